"""Tables and charts of the suites that have many of them."""
