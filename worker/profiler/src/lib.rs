//! Measures CPU, NUMA, memory, disk and network of this machine.
