"""The update of a step split by owners: `Trainer(partition="optimizer")`."""
