"""Results as JSON and Markdown, and the machine that they were measured on."""
