"""Operations that are made of others here, in one fixed way: run inside the mode."""
