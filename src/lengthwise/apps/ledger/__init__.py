"""Where tasks and their answers are kept: one contract, several stores."""
