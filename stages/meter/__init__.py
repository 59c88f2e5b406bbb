"""The noun *meter*: floating-point operations from the operators that ran, memory from the process, machine facts."""
