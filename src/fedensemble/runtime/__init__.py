"""The machine under the library: hardware, threads, memory and allocator."""
