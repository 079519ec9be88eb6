"""Results as JSON, Markdown and pictures, and the machine that they were measured on."""
