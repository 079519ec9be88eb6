"""Tables of the suites that have many of them."""
