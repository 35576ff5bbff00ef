"""The functions of `nd`, `np` and `npx` as tables of plain functions of torch tensors."""
