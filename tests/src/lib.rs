//! What the end-to-end tests, the demo and the benchmarks share.
//!
//! * [`simulated`]: driver roots for machines without GPUs;
//! * [`programs`]: what was built, and which engines there are;
//! * [`host`]: a simulated machine with a containerd of its own;
//! * [`docker`]: Docker and Podman on the same machine;
//! * [`seen`]: what a container saw;
//! * [`limited`]: a CUDA program in containers with a memory limit;
//! * [`cri`]: a client of the Kubernetes container runtime interface;
//! * [`api_server`]: a Kubernetes API server with faults; [`cluster`]: an extender beside it;
//! * [`node`]: the node agent on such a machine;
//! * [`figures`]: what benchmarks report;
//! * [`leaks`]: what is left behind.

pub mod api_server;
pub mod cluster;
pub mod cri;
pub mod docker;
pub mod figures;
pub mod host;
pub mod leaks;
pub mod limited;
pub mod node;
pub mod programs;
pub mod seen;
pub mod simulated;
