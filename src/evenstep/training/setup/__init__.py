"""From what a trainer was given to the parts of its steps: checked, combined, chosen."""
