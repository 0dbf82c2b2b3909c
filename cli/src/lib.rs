//! The `gpufence` command.
//!
//! * [`arguments`]: what the command line can say;
//! * [`inventory`], [`cdi`]: what this node has, and CDI specs of it;
//! * [`configure`]: engines' own configuration, edited to use us;
//! * [`keygen`]: keys that sign grants;
//! * [`probe`]: what a container sees, told from inside it;
//! * [`demo`]: five containers on a containerd of its own, from [`image`] and [`engine`];
//! * [`manual`]: manual pages and completions;
//! * [`table`]: text in columns.

pub mod arguments;
pub mod cdi;
pub mod configure;
pub mod demo;
pub mod engine;
pub mod image;
pub mod inventory;
pub mod keygen;
pub mod manual;
pub mod probe;
pub mod table;
