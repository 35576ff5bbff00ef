"""What a person sees: lines, tables, progress; and the files that commands write."""
