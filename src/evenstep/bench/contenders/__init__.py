"""What is compared: each module is a script that trains one way and prints one JSON line."""
