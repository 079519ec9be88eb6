"""Training by other libraries, by ours and without a pipeline, in processes of their own."""
