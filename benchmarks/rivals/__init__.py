"""Whoever trains: other libraries, ours and plain training, in processes of their own."""
