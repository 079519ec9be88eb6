"""The promises to users, each once, over all wrappers that make it."""
