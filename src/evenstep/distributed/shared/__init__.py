"""What processes of one machine exchange through memory that they share."""
