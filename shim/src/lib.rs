//! Enforcement: grant + inventory + policy make edits of an OCI spec.
//!
//! [`enforce`] reads as the list of the design's rules, in order; each rule lives in a module of its own, named after
//! the part of the OCI spec that it touches, and is a pure function on JSON: [`hooks`], [`devices`], [`device_rules`],
//! [`mounts`], [`environment`], [`capabilities`]. [`bundle`] is the thin edge which reads and writes files:
//! `config.json`, the inventory, the stage, the image's `ld.so.cache` and the container's [`state`] folder.
//! [`policy`] is the administrator's word, [`identity`] says which container of which Pod a bundle is for, [`trust`] whether
//! its grant is to be believed,
//! [`memory`] is the ladder of memory limits, [`mps`] its second rung and [`limiter`] its third,
//! [`exec`] holds processes that are added later, [`visible_devices`] reads what a standalone host may take for a grant, and [`runtime_path`] finds the low-level runtime.
//!
//! `config.json` stays a [`serde_json::Value`] throughout: typed structs would drop fields that they don't know and
//! fail on enum values that they don't know, such as a new capability's name.

pub mod bundle;
pub mod capabilities;
pub mod device_rules;
pub mod devices;
pub mod enforce;
pub mod environment;
mod error;
pub mod exec;
pub mod hooks;
pub mod identity;
mod json;
pub mod limiter;
pub mod memory;
pub mod mounts;
pub mod mps;
pub mod policy;
pub mod runtime_path;
pub mod state;
pub mod trust;
pub mod visible_devices;

pub use error::EnforceError;
