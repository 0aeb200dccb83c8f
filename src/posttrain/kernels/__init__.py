"""Functions of rows of bf16 numbers that torch has no single CPU operation for, in C.

They are compiled on first use with the system's C compiler and called through ctypes. Sampler and
learner call the same function, and a row's result depends on that row alone, so both get the same
bits. Without a compiler, and for everything that is not bf16 on a CPU, callers use torch.
"""
