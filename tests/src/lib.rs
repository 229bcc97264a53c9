//! Multi-process tests: goldens, conformance, failover, load, bad input.
