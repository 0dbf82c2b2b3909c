//! The thin edge around [`crate::enforce`]: reads a bundle and what the node has, writes `config.json` back.

use std::{
    borrow::Cow,
    fs,
    io::{Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use gpufence_cdi::{
    capability::DriverCapabilities,
    devices::Devices,
    edits::{self, CONTAINER_FOLDER, EditOptions},
    fence::Fence,
    inventory::{Found, Inventory, Roots},
    loader::{self, Choice, LoaderFile},
    root::Root,
    spec::{self, ContainerEdits, SpecMount},
    stage::Stage,
};
use gpufence_grant::{
    GpuReference, Recipients, Share,
    agent::{Cap, ContainerCaps, PodCaps},
    annotation::{self, AnnotatedGrant},
    limits::{self, Limit, Limits},
};
use serde_json::{Map, Value};
use time::OffsetDateTime;

use crate::{
    EnforceError,
    enforce::{self, Given},
    environment::{self, Granted},
    error::io_error,
    exec::Held,
    hooks,
    identity::{ContainerKind, Identity},
    limiter::Limiter,
    memory::{self, Rung},
    mps,
    policy::Policy,
    runtime_path,
    state::{ContainerFolder, RECORD, Record, RecordedShare, View},
    trust, visible_devices,
};

/// No engine writes a longer `config.json`; reading one would only hurt us.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// What a container was made to be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// What its processes are held to, those too that exec adds later.
    pub held: Held,
    /// It has no PID namespace of its own, so its processes outlive its init.
    pub shares_pids: bool,
}

/// A bundle that a container is to be made from.
#[derive(Debug, Clone, Copy)]
pub struct Bundle<'a> {
    /// Its folder, which has `config.json`.
    pub folder: &'a Path,
    /// The container's root, already mounted; by default what `config.json` says.
    pub rootfs: Option<&'a Path>,
    /// The engine's namespace.
    pub namespace: &'a str,
    /// The container's id.
    pub id: &'a str,
    /// A grant in the short form that the administrator has fixed for this runtime.
    pub fixed_grant: Option<&'a str>,
    /// Whether the container is restored from a checkpoint: its nodes are then made by CRIU, after the time at which
    /// `gpufence-hook` would look for them, so it isn't checked.
    pub restored: bool,
    /// Whether `gpufence-hook`, which checks a container with a grant before it starts, cleans up after it as well: where
    /// nobody else does, as under a runtime that leaves no process.
    pub clean_up_by_hook: bool,
}

/// Enforces the grant on a bundle.
///
/// On an error nothing of ours is left behind and `config.json` is as it was.
pub fn enforce_bundle(policy: &Policy, bundle: &Bundle<'_>) -> Result<Outcome, EnforceError> {
    let file = bundle.folder.join("config.json");
    let before = read_config(&file)?;
    let annotations = annotations(&before, &file)?;
    let identity = Identity::of(bundle.id, &annotations);
    let annotated =
        annotation::read(annotations.iter().filter_map(|(key, value)| Some((key.as_str(), value.as_str()?))))?;
    let grant = match (annotated, bundle.fixed_grant) {
        (Some(_), Some(_)) => return Err(EnforceError::TwoGrants),
        (None, Some(text)) => Some(annotation::read_fixed(text)?),
        (None, None) if policy.accept_visible_devices && !identity.in_pod => requested(policy, &before)?,
        (grant, None) => grant,
    };
    if let Some(grant) = &grant {
        trust::check(grant, &identity, policy, OffsetDateTime::now_utc())?;
    }
    let shares = match (&grant, identity.kind) {
        (Some(grant), ContainerKind::Container) => grant.grant.shares_of(&identity.name),
        _ => &[],
    };
    let prepared = match &grant {
        Some(grant) if !shares.is_empty() => {
            let root = bundle.rootfs.map_or_else(|| bundle_root(bundle.folder, &before), Path::to_owned);
            Some(prepare(policy, grant, shares, &identity, &before, &root, bundle)?)
        }
        _ => None,
    };
    let outcome = finish(policy, &file, &before, prepared.as_ref(), bundle);
    if outcome.is_err() {
        let _ = crate::state::clean_up(policy, bundle.namespace, bundle.id);
    }
    outcome
}

/// What the environment asks for, on a standalone host whose policy takes that for a grant of whole GPUs.
fn requested(policy: &Policy, spec: &Value) -> Result<Option<AnnotatedGrant>, EnforceError> {
    let Some(text) = spec.get("process").and_then(visible_devices::wish) else { return Ok(None) };
    if visible_devices::is_nothing(text) {
        return Ok(None);
    }
    let inventory = Inventory::current(&Roots::open(&policy.driver_root)?, &policy.inventory_file())?;
    visible_devices::grant(text, &inventory.devices).map(Some)
}

/// What a container with a grant gets, with its folder on the host not yet made.
struct Prepared {
    /// The root that has the host's own device nodes.
    host: PathBuf,
    devices: Devices,
    edits: ContainerEdits,
    granted: Granted,
    record: Record,
    limits: String,
    loader_files: Vec<LoaderFile>,
    view: View,
    /// Where the driver holds it to its memory limit.
    caps: Option<ContainerCaps>,
}

fn prepare(
    policy: &Policy,
    grant: &AnnotatedGrant,
    shares: &[Share],
    identity: &Identity,
    spec: &Value,
    rootfs: &Path,
    bundle: &Bundle<'_>,
) -> Result<Prepared, EnforceError> {
    let unmet = |source| EnforceError::Unmet { origin: grant.origin, source };
    let roots = Roots::open(&policy.driver_root).map_err(unmet)?;
    let inventory = Inventory::current(&roots, &policy.inventory_file()).map_err(unmet)?;
    let found = shares.iter().map(|share| find(&inventory, share).map_err(unmet)).collect::<Result<Vec<_>, _>>()?;
    for (share, found) in shares.iter().zip(&found) {
        check_memory(grant, share, found)?;
    }
    let capabilities = spec
        .get("process")
        .and_then(|process| environment::chosen_capabilities(process, &policy.allowed_driver_capabilities))
        .unwrap_or_else(|| {
            policy.default_driver_capabilities.intersection(&policy.allowed_driver_capabilities).copied().collect()
        });
    let options = edit_options(policy, capabilities);
    let stage = Stage::ensure(&policy.stage_dir, &inventory, &roots.driver).map_err(unmet)?;
    let mut edits = edits::devices(&inventory.devices, &found, &options).map_err(unmet)?;
    let mut driver = edits::driver(&stage, &options);

    let folder = ContainerFolder::of(policy, bundle.namespace, bundle.id)?;
    let in_folder = |name: &str, container_path: &str| {
        edits::read_only(folder.path().join(name).to_string_lossy().into_owned(), container_path.to_owned())
    };
    let visible: Vec<String> = shares.iter().zip(&found).map(|(share, found)| uuid(share, found)).collect();
    let is_instance = |found: &Found<'_>| matches!(found, Found::Mig(..));
    let named: Vec<(String, bool)> = visible.iter().cloned().zip(found.iter().map(is_instance)).collect();
    let limiter = memory::limiter(policy)?;
    let agent = memory::agent(policy);
    let daemon = mps::daemon(&mps::sets(policy, &inventory), agent.as_ref(), &visible, grant.grant.mode)
        .map_err(|what| EnforceError::Mps { origin: grant.origin, what })?;
    let capped = memory::driver_caps(agent.as_ref(), &stage.driver_version, &named, bundle.restored);
    let rung = match (&capped, daemon, &limiter) {
        (Ok(()), ..) => Rung::Driver,
        (Err(_), Some(_), _) => Rung::Mps,
        (Err(_), None, Some(_)) => Rung::Limiter,
        (Err(_), None, None) => Rung::None,
    };
    memory::accept(policy, rung, capped.as_ref().err().map_or("", String::as_str))?;
    let caps = match capped {
        Ok(()) => Some(ContainerCaps {
            socket: policy.agent_socket(),
            container: caps_of(&inventory, shares).map_err(unmet)?,
            pod: pod_caps(&inventory, grant, identity).map_err(unmet)?,
        }),
        Err(_) => None,
    };
    let mut view = View { folders: mount_points(&driver.mounts), ..View::default() };
    // The view comes first: the stage's folders are mounted into it.
    edits.mounts.push(in_folder("view", CONTAINER_FOLDER));
    edits.mounts.append(&mut driver.mounts);
    // One number for all GPUs of a client: the smallest of its shares.
    let percent = shares.iter().filter_map(|share| share.compute_percent).min().unwrap_or(100);
    let has_limiter = limiter.is_some();
    if let Some(limiter) = limiter {
        // MPS's server keeps a client to its part of the GPU, and no launch has to wait.
        let compute_limited = percent < 100 && daemon.is_none();
        let (mut mounts, mut limiter_view) = limiter.brings(&stage, &options.capabilities, compute_limited);
        edits.mounts.append(&mut mounts);
        view.folders.append(&mut limiter_view.folders);
        view = View { folders: view.folders, ..limiter_view };
    }
    if let Some(daemon) = daemon {
        edits.mounts.extend(mps::mounts(daemon));
        view.folders.extend(mps::FOLDERS.map(str::to_owned));
    }
    let mps_percent = daemon.map(|_| percent);
    let choice = Choice { capabilities: &options.capabilities, cuda_compat: policy.cuda_compat, limiter: has_limiter };
    let loader_files = loader::files(&Root::open(rootfs)?, &stage, choice)?;
    edits.mounts.extend(loader_files.iter().map(|file| in_folder(file.name, &file.container_path)));

    let limits: Vec<Limit> = shares
        .iter()
        .zip(&visible)
        .map(|(share, uuid)| Limit {
            uuid: uuid.clone(),
            memory_bytes: share.memory_mib << 20,
            compute_percent: share.compute_percent.unwrap_or(100),
        })
        .collect();
    let recorded = shares.iter().zip(&visible).map(|(share, uuid)| RecordedShare {
        gpu: uuid.clone(),
        memory_mib: share.memory_mib,
        compute_percent: share.compute_percent,
    });
    let record = Record {
        namespace: bundle.namespace.to_owned(),
        id: bundle.id.to_owned(),
        name: identity.name.clone(),
        pod_uid: identity.pod_uid.clone(),
        origin: grant.origin.to_owned(),
        driver_version: stage.driver_version.clone(),
        shares: recorded.collect(),
        driver_capabilities: options.capabilities.clone(),
        dropped_capabilities: Vec::new(),
        memory_held_by: rung,
        mps_percent,
    };
    Ok(Prepared {
        host: roots.host.path().to_owned(),
        devices: inventory.devices,
        edits,
        granted: Granted {
            visible,
            memory_mib: shares.iter().map(|share| share.memory_mib).collect(),
            capabilities: options.capabilities,
            mps_percent,
        },
        record,
        limits: limits::write(&Limits { gpus: limits, on_failure: policy.memory.on_limiter_failure }),
        loader_files,
        view,
        caps,
    })
}

/// The driver's caps that follow from shares; those of one GPU are summed up.
fn caps_of<'a>(
    inventory: &Inventory,
    shares: impl IntoIterator<Item = &'a Share>,
) -> Result<Vec<Cap>, gpufence_cdi::CdiError> {
    let mut caps: Vec<Cap> = Vec::new();
    for share in shares {
        let (gpu, bytes) = (uuid(share, &find(inventory, share)?), share.memory_mib << 20);
        match caps.iter_mut().find(|cap| cap.gpu == gpu) {
            Some(cap) => cap.memory_bytes += bytes,
            None => caps.push(Cap { gpu, memory_bytes: bytes }),
        }
    }
    Ok(caps)
}

/// What a Pod's containers were granted together. A cap is none where one of them has a MIG instance.
fn pod_caps(
    inventory: &Inventory,
    grant: &AnnotatedGrant,
    identity: &Identity,
) -> Result<Option<PodCaps>, gpufence_cdi::CdiError> {
    let (Some(uid), Recipients::Named(containers)) = (&identity.pod_uid, &grant.grant.recipients) else {
        return Ok(None);
    };
    let mut caps = caps_of(inventory, containers.values().flatten())?;
    caps.retain(|cap| cap.gpu.starts_with("GPU-"));
    Ok(Some(PodCaps { uid: uid.clone(), caps }))
}

/// What policy gives a container of these driver capabilities.
pub fn edit_options(policy: &Policy, capabilities: DriverCapabilities) -> EditOptions {
    EditOptions { capabilities, binaries: policy.binaries.clone(), firmware: policy.firmware }
}

fn finish(
    policy: &Policy,
    file: &Path,
    before: &Value,
    prepared: Option<&Prepared>,
    bundle: &Bundle<'_>,
) -> Result<Outcome, EnforceError> {
    let folder = ContainerFolder::of(policy, bundle.namespace, bundle.id)?;
    let devices = match prepared {
        Some(prepared) => Cow::Borrowed(&prepared.devices),
        None => Cow::Owned(Devices::discover(&Roots::open(&policy.driver_root)?.host)?),
    };
    let (edits, granted) =
        prepared.map_or_else(Default::default, |prepared| (prepared.edits.clone(), prepared.granted.clone()));
    let containers = policy.state_dir.join("containers");
    let limiter = Limiter::folder(policy);
    let daemons = mps::folder(policy);
    let mount_sources: Vec<&Path> = [Some(&policy.stage_dir), Some(&containers), Some(&daemons), limiter.as_ref()]
        .into_iter()
        .flatten()
        .map(PathBuf::as_path)
        .collect();
    let dropped_capabilities = enforce::dropped_capabilities(before, &granted, shares_host_pids(before), policy);
    let given = Given {
        edits: &edits,
        granted: &granted,
        devices: &devices,
        dropped_capabilities: &dropped_capabilities,
        policy,
        mount_sources: &mount_sources,
    };
    let mut after = enforce::enforce(before.clone(), &given)?;
    if prepared.is_some() && !bundle.restored {
        hooks::add_own(&mut after, folder.path(), &runtime_path::hook(policy)?, bundle.clean_up_by_hook)?;
    }
    if let Some(prepared) = prepared {
        folder.create(&prepared.view)?;
        folder.write("view/limits", prepared.limits.as_bytes())?;
        for file in &prepared.loader_files {
            folder.write(file.name, &file.content)?;
        }
        let json =
            |value: Result<String, serde_json::Error>| value.map_err(|error| EnforceError::Shape(error.to_string()));
        let record = Record { dropped_capabilities: dropped_capabilities.clone(), ..prepared.record.clone() };
        folder.write(RECORD, json(serde_json::to_string_pretty(&record))?.as_bytes())?;
        let own = spec::container_spec(spec::device_name(bundle.id), edits.clone());
        let fence = Fence::of(&devices, &edits.device_nodes, &prepared.host);
        folder.write("fence.json", json(serde_json::to_string(&fence))?.as_bytes())?;
        if let Some(caps) = &prepared.caps {
            folder.write(ContainerCaps::FILE, json(serde_json::to_string(caps))?.as_bytes())?;
        }
        folder.write("cdi.json", json(serde_json::to_string_pretty(&own))?.as_bytes())?;
    }
    if let Some(Prepared { record, .. }) = prepared {
        log::info!("{}: GPU memory is held by \"{}\"", bundle.id, record.memory_held_by);
        crate::state::remove_old_stages(policy);
    }
    if after != *before {
        write_config(file, &after)?;
    }
    Ok(Outcome { held: Held { granted, dropped_capabilities }, shares_pids: shares_pids(before) })
}

fn read_config(file: &Path) -> Result<Value, EnforceError> {
    let error = |what: String| EnforceError::Spec { path: file.to_owned(), what };
    let mut bytes = Vec::new();
    let input = fs::File::open(file).map_err(io_error("open", file))?;
    input.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes).map_err(io_error("read", file))?;
    if bytes.len() as u64 > MAX_CONFIG_BYTES {
        return Err(error(format!("longer than {MAX_CONFIG_BYTES} bytes")));
    }
    let value: Value = serde_json::from_slice(&bytes).map_err(|source| error(source.to_string()))?;
    if value.is_object() { Ok(value) } else { Err(error("not a JSON object".into())) }
}

/// Writes by temporary file and rename, with owner and mode of the file that was there.
fn write_config(file: &Path, spec: &Value) -> Result<(), EnforceError> {
    let bytes = serde_json::to_vec(spec).map_err(|error| EnforceError::Shape(error.to_string()))?;
    let temporary = file.with_extension("json.gpufence");
    let write = || {
        let before = fs::metadata(file)?;
        let mut output = fs::File::create(&temporary)?;
        output.set_permissions(fs::Permissions::from_mode(before.mode() & 0o7777))?;
        std::os::unix::fs::fchown(&output, Some(before.uid()), Some(before.gid()))?;
        output.write_all(&bytes)?;
        fs::rename(&temporary, file)
    };
    write().map_err(|source| {
        let _ = fs::remove_file(&temporary);
        io_error("write", file)(source)
    })
}

fn annotations(spec: &Value, file: &Path) -> Result<Map<String, Value>, EnforceError> {
    match spec.get("annotations") {
        None | Some(Value::Null) => Ok(Map::new()),
        Some(Value::Object(map)) => Ok(map.clone()),
        Some(_) => Err(EnforceError::Spec { path: file.to_owned(), what: "annotations is not an object".into() }),
    }
}

/// The path of the PID namespace that the container gets: empty for one of its own, none where none is named.
fn pid_namespace(spec: &Value) -> Option<&str> {
    let mut namespaces = spec.pointer("/linux/namespaces")?.as_array()?.iter();
    let named = namespaces.find(|namespace| namespace["type"] == "pid")?;
    Some(named["path"].as_str().unwrap_or_default())
}

/// Whether the container gets no PID namespace of its own.
fn shares_pids(spec: &Value) -> bool {
    pid_namespace(spec) != Some("")
}

/// Whether the container gets no PID namespace but the host's: none is named, or the host's own by its path.
fn shares_host_pids(spec: &Value) -> bool {
    let Some(path) = pid_namespace(spec) else { return true };
    let identity = |path: &str| fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
    !path.is_empty() && identity(path) == identity("/proc/self/ns/pid")
}

/// `root.path`, relative to the bundle.
fn bundle_root(bundle: &Path, spec: &Value) -> PathBuf {
    bundle.join(spec.pointer("/root/path").and_then(Value::as_str).unwrap_or("rootfs"))
}

fn find<'a>(inventory: &'a Inventory, share: &Share) -> Result<Found<'a>, gpufence_cdi::CdiError> {
    match &share.gpu {
        GpuReference::Index(index) => inventory.find(Some(*index), &index.to_string()),
        GpuReference::Uuid(uuid) => inventory.find(None, uuid),
    }
}

/// Where NVML has told how much memory there is, a share can't have more.
fn check_memory(grant: &AnnotatedGrant, share: &Share, found: &Found<'_>) -> Result<(), EnforceError> {
    let present = match found {
        Found::Gpu(gpu) => gpu.memory_mib,
        Found::Mig(_, instance) => instance.memory_mib,
    };
    match present {
        Some(present) if share.memory_mib > present => Err(EnforceError::TooMuch {
            origin: grant.origin,
            gpu: share.gpu.to_string(),
            granted: share.memory_mib,
            present,
        }),
        _ => Ok(()),
    }
}

fn uuid(share: &Share, found: &Found<'_>) -> String {
    let known = match found {
        Found::Gpu(gpu) => gpu.uuid.clone(),
        Found::Mig(_, instance) => instance.uuid.clone(),
    };
    known.unwrap_or_else(|| share.gpu.to_string())
}

/// The folders right below ours that the stage's are mounted on.
fn mount_points(mounts: &[SpecMount]) -> Vec<String> {
    mounts
        .iter()
        .filter_map(|mount| mount.container_path.strip_prefix(CONTAINER_FOLDER)?.strip_prefix('/'))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whose_processes_it_sees() {
        for (namespaces, expected) in [
            (json!([{"type": "pid"}]), false),
            (json!([{"type": "mount"}]), true),
            (json!([{"type": "pid", "path": "/proc/self/ns/pid"}]), true),
            // Another namespace's file, as a Pod's containers have it; and one that can't be read, which runc refuses.
            (json!([{"type": "pid", "path": "/proc/self/ns/mnt"}]), false),
            (json!([{"type": "pid", "path": "/nothing"}]), false),
            (Value::Null, true),
        ] {
            let spec = json!({"linux": {"namespaces": namespaces}});
            assert_eq!(shares_host_pids(&spec), expected, "{spec}");
        }
    }

    #[test]
    fn a_config_is_bounded_and_an_object() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        for (text, expected) in [("[]", "not a JSON object"), ("{", "EOF while parsing"), ("", "EOF while parsing")] {
            fs::write(&file, text).unwrap();
            let error = read_config(&file).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn writing_keeps_owner_and_mode() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        fs::write(&file, "{}").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        write_config(&file, &json!({"a": 1})).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
        assert_eq!(fs::read_to_string(&file).unwrap(), "{\"a\":1}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "the temporary file is gone");
    }
}
