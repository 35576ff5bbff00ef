"""What evenstep reads of torch under names with an underscore: one module for each subject."""
