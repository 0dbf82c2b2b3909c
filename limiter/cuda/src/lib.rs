//! The shadow `libcuda.so.1`: it stands before NVIDIA's, which it needs as `libcuda-driver.so.1`, and exports only what it
//! must see. Every other entry point is found in the real one by the dynamic linker's own search.
//!
//! * [`result`]: the real driver, and the words it answers with;
//! * [`driver`]: what it asks of the real driver itself;
//! * [`account`]: what an allocation meets, reserved before it is made and given back after;
//! * [`book`]: what was allocated, by pointer or handle;
//! * [`linear`], [`pools`], [`virtual_memory`], [`arrays`], [`graphs`]: allocations in all their forms;
//! * [`contexts`]: what the driver takes for a context, measured;
//! * [`report`]: the share, not the card;
//! * [`lookup`]: cuGetProcAddress, which gives ours where it would give the real one of ours;
//! * [`launches`]: the compute limit, in the library's other variant.
//!
//! Names, arguments and structures are those of the CUDA driver API's reference manual.

#![cfg_attr(not(test), no_std)]
#![allow(unsafe_code, reason = "a C interface; each place says why it is sound")]
#![allow(non_snake_case, reason = "the driver's own names")]
#![allow(clippy::missing_safety_doc, reason = "the driver's manual says what its functions want")]

pub mod account;
pub mod arrays;
pub mod book;
pub mod contexts;
pub mod driver;

pub mod graphs;
#[cfg(feature = "compute")]
pub mod launches;
pub mod linear;
pub mod lookup;
pub mod pools;
pub mod report;
pub mod result;
pub mod virtual_memory;
