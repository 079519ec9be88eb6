"""What two processes compute together, beside what one does."""
