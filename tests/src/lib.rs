//! What the end-to-end tests, the demo and the benchmarks share: simulated driver roots, and engines of their own.

pub mod simulated;
