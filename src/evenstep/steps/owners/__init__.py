"""The update of a step split by owners: `Layout(divide=Owners())`."""
