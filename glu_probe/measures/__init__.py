"""Pure functions from factors to numbers, and the register that says what each number means."""
