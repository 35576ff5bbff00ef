"""The benchmarks: each module says what is measured and how its tables are made of the runs."""
