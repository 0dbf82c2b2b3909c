//! The shadow `libnvidia-ml.so.1`: it stands before NVIDIA's, which it needs as `libnvidia-ml-driver.so.1`, and shows the
//! container's own GPUs, memory and processes only. Every other entry point is found in the real one by the dynamic
//! linker's own search. Nothing is enforced here.
//!
//! * [`real`]: the real NVML, and the words it answers with;
//! * [`devices`]: the GPUs of the grant, in its order;
//! * [`memory`]: the share, not the card;
//! * [`processes`]: the processes of the usage table, not the card's.
//!
//! Names, arguments and structures are those of NVML's reference manual (nvml.h).

#![cfg_attr(not(test), no_std)]
#![allow(unsafe_code, reason = "a C interface; each place says why it is sound")]
#![allow(non_snake_case, reason = "NVML's own names")]
#![allow(clippy::missing_safety_doc, reason = "NVML's manual says what its functions want")]

pub mod devices;
pub mod memory;
pub mod processes;
pub mod real;
