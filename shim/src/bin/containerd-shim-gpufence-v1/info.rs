//! The `-info` action, which containerd 2 asks of every configured runtime.

use std::io::Write;

use containerd_shim::protos::{
    protobuf::{Message, MessageField, well_known_types::any::Any},
    types::introspection::{RuntimeInfo, RuntimeVersion},
};
use gpufence_shim::policy::Policy;

use crate::{
    Failure, RUNTIME_NAME,
    options::{Options, read_stdin},
};

/// The type under which containerd looks for a runtime's features.
const FEATURES_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Prints what this runtime is, with the wrapped one's own `features`. A runtime that can't tell its features has
/// none to report, which is no fault: containerd starts without.
pub fn print() -> Result<(), Failure> {
    let input = read_stdin()?;
    let any = if input.is_empty() { None } else { Some(Any::parse_from_bytes(&input)?) };
    let options = Options::decode(any.as_ref())?;
    let features = options.runtime(&Policy::load()?).ok().and_then(|runtime| {
        let output = std::process::Command::new(runtime).arg("features").output().ok()?;
        output.status.success().then_some(output.stdout)
    });
    let version = RuntimeVersion { version: env!("CARGO_PKG_VERSION").into(), ..Default::default() };
    let info = RuntimeInfo {
        name: RUNTIME_NAME.into(),
        version: MessageField::some(version),
        options: any.into(),
        features: features.map(|value| Any { type_url: FEATURES_TYPE.into(), value, ..Any::default() }).into(),
        ..Default::default()
    };
    Ok(std::io::stdout().write_all(&info.write_to_bytes()?)?)
}
