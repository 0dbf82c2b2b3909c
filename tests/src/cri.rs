//! A client of CRI, as the kubelet is one: Pods on the host's network, so that no CNI is needed.

use std::{collections::HashMap, path::Path, time::Duration};

use anyhow::{Context, Result, bail};
use hyper_util::rt::TokioIo;
use k8s_cri::v1::{
    ContainerConfig, ContainerMetadata, CreateContainerRequest, ExecSyncRequest, ImageSpec, LinuxContainerConfig,
    LinuxContainerResources, LinuxContainerSecurityContext, LinuxPodSandboxConfig, LinuxSandboxSecurityContext,
    NamespaceMode, NamespaceOption, PodSandboxConfig, PodSandboxMetadata, RemovePodSandboxRequest,
    RunPodSandboxRequest, StartContainerRequest, StopPodSandboxRequest, UpdateContainerResourcesRequest,
    runtime_service_client::RuntimeServiceClient,
};
use tokio::{net::UnixStream, runtime::Runtime};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::programs::Engine;

/// A runtime in containerd's configuration.
#[derive(Debug, Clone, Default)]
pub struct RuntimeEntry {
    /// The handler, as a RuntimeClass names it.
    pub name: &'static str,
    /// `runtime_type`.
    pub runtime_type: String,
    /// `runtime_path`, for a shim that isn't found by its type.
    pub runtime_path: Option<String>,
    /// The options table, in TOML.
    pub options: String,
    /// `pod_annotations`.
    pub pod_annotations: &'static [&'static str],
}

/// containerd's configuration for CRI with these runtimes.
pub fn configuration(engine: Engine, runtimes: &[RuntimeEntry], cdi_folder: &Path) -> String {
    let (version, cri, images) = match engine {
        Engine::Containerd16 | Engine::Containerd17 => ("2", "io.containerd.grpc.v1.cri", ""),
        Engine::Containerd2 => (
            "3",
            "io.containerd.cri.v1.runtime",
            "[plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = \"docker.io/gpufence/test:latest\"\n",
        ),
    };
    let sandbox_image = if images.is_empty() { "sandbox_image = \"docker.io/gpufence/test:latest\"\n" } else { "" };
    // 1.6 has no CDI.
    let cdi = match engine {
        Engine::Containerd16 => String::new(),
        _ => format!("enable_cdi = true\ncdi_spec_dirs = [{cdi_folder:?}]\n"),
    };
    let mut text = format!(
        "version = {version}\n[plugins.'{cri}']\n{cdi}{sandbox_image}restrict_oom_score_adj = true\n[plugins.'{cri}'.containerd]\ndefault_runtime_name = \"{}\"\n",
        runtimes.first().map_or("gpufence", |runtime| runtime.name)
    );
    for runtime in runtimes {
        let table = format!("plugins.'{cri}'.containerd.runtimes.{}", runtime.name);
        text.push_str(&format!(
            "[{table}]\nruntime_type = \"{}\"\npod_annotations = {:?}\n",
            runtime.runtime_type, runtime.pod_annotations
        ));
        if let Some(path) = &runtime.runtime_path {
            text.push_str(&format!("runtime_path = \"{path}\"\n"));
        }
        text.push_str(&format!("[{table}.options]\n{}\n", runtime.options));
    }
    text + images
}

/// The client.
pub struct Cri {
    /// The cgroup of Pods, as the kubelet makes it; empty: the engine's own choice.
    pub cgroup_parent: String,
    runtime: Runtime,
    client: RuntimeServiceClient<Channel>,
}

/// A Pod that runs.
#[derive(Debug, Clone)]
pub struct Pod {
    /// The sandbox's id.
    pub id: String,
    /// The Pod's UID.
    pub uid: String,
    config: PodSandboxConfig,
}

impl Cri {
    /// Connects to containerd and waits until its CRI serves.
    pub fn connect(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let socket = socket.to_owned();
        let connector = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
        });
        let endpoint = Endpoint::try_from("http://localhost")?;
        let channel = runtime.block_on(endpoint.connect_with_connector(connector)).context("connect to CRI")?;
        let mut client = RuntimeServiceClient::new(channel);
        runtime.block_on(async {
            for _ in 0..100 {
                if client.version(k8s_cri::v1::VersionRequest::default()).await.is_ok() {
                    return Ok(());
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            bail!("CRI doesn't serve")
        })?;
        Ok(Self { cgroup_parent: String::new(), runtime, client })
    }

    /// Starts a Pod's sandbox.
    pub fn run_pod(
        &mut self,
        name: &str,
        handler: &str,
        annotations: &[(&str, &str)],
        privileged: bool,
    ) -> Result<Pod> {
        self.run_pod_as(&pod_uid(), name, handler, annotations, privileged)
    }

    /// The same for a Pod that has a UID already.
    pub fn run_pod_as(
        &mut self,
        uid: &str,
        name: &str,
        handler: &str,
        annotations: &[(&str, &str)],
        privileged: bool,
    ) -> Result<Pod> {
        let uid = uid.to_owned();
        let host_network = NamespaceOption { network: NamespaceMode::Node.into(), ..NamespaceOption::default() };
        let security = LinuxSandboxSecurityContext {
            privileged,
            namespace_options: Some(host_network),
            ..LinuxSandboxSecurityContext::default()
        };
        let config = PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: name.into(),
                uid: uid.clone(),
                namespace: "tests".into(),
                attempt: 0,
            }),
            log_directory: format!("/run/{name}-logs"),
            annotations: annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: self.cgroup_parent.clone(),
                security_context: Some(security),
                ..LinuxPodSandboxConfig::default()
            }),
            ..PodSandboxConfig::default()
        };
        let request = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: handler.into() };
        let answer = self.runtime.block_on(self.client.run_pod_sandbox(request)).map_err(|status| {
            let _ = std::fs::remove_dir_all(&config.log_directory);
            said(status)
        })?;
        Ok(Pod { id: answer.into_inner().pod_sandbox_id, uid, config })
    }

    /// Creates and starts a container that sleeps.
    pub fn run_container(
        &mut self,
        pod: &Pod,
        name: &str,
        environment: &[(&str, &str)],
        privileged: bool,
    ) -> Result<String> {
        self.run_with_devices(pod, name, environment, privileged, &[])
    }

    /// The same with CDI devices, which a device plugin asks for.
    pub fn run_with_devices(
        &mut self,
        pod: &Pod,
        name: &str,
        environment: &[(&str, &str)],
        privileged: bool,
        devices: &[&str],
    ) -> Result<String> {
        let id = self.create_container(pod, name, environment, privileged, devices)?;
        let request = StartContainerRequest { container_id: id.clone() };
        self.runtime.block_on(self.client.start_container(request)).map_err(said)?;
        Ok(id)
    }

    fn create_container(
        &mut self,
        pod: &Pod,
        name: &str,
        environment: &[(&str, &str)],
        privileged: bool,
        devices: &[&str],
    ) -> Result<String> {
        let host_network = NamespaceOption { network: NamespaceMode::Node.into(), ..NamespaceOption::default() };
        let security = LinuxContainerSecurityContext {
            privileged,
            namespace_options: Some(host_network),
            ..LinuxContainerSecurityContext::default()
        };
        let image = ImageSpec { image: "docker.io/gpufence/test:latest".into(), ..ImageSpec::default() };
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
            image: Some(image),
            command: ["/bin/sleep", "1000"].map(str::to_owned).to_vec(),
            envs: environment
                .iter()
                .map(|(key, value)| k8s_cri::v1::KeyValue { key: (*key).into(), value: (*value).into() })
                .collect(),
            cdi_devices: devices.iter().map(|name| k8s_cri::v1::CdiDevice { name: (*name).into() }).collect(),
            annotations: HashMap::new(),
            log_path: format!("{name}.log"),
            linux: Some(LinuxContainerConfig { security_context: Some(security), ..LinuxContainerConfig::default() }),
            ..ContainerConfig::default()
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.id.clone(),
            config: Some(config),
            sandbox_config: Some(pod.config.clone()),
        };
        let answer = self.runtime.block_on(self.client.create_container(request)).map_err(said)?;
        Ok(answer.into_inner().container_id)
    }

    /// Runs a command in a container and gives what it printed.
    pub fn exec(&mut self, container: &str, command: &[&str]) -> Result<String> {
        let request = ExecSyncRequest {
            container_id: container.into(),
            cmd: command.iter().map(|&word| word.to_owned()).collect(),
            timeout: 20,
        };
        let answer = self.runtime.block_on(self.client.exec_sync(request)).map_err(said)?.into_inner();
        if answer.exit_code != 0 {
            bail!("exit status {}: {}", answer.exit_code, String::from_utf8_lossy(&answer.stderr));
        }
        Ok(String::from_utf8_lossy(&answer.stdout).into_owned())
    }

    /// Sets a container's memory limit, as an in-place resize of a Pod does.
    pub fn set_memory(&mut self, container: &str, bytes: i64) -> Result<()> {
        let linux = LinuxContainerResources { memory_limit_in_bytes: bytes, ..LinuxContainerResources::default() };
        let request = UpdateContainerResourcesRequest {
            container_id: container.into(),
            linux: Some(linux),
            ..UpdateContainerResourcesRequest::default()
        };
        self.runtime.block_on(self.client.update_container_resources(request)).map_err(said)?;
        Ok(())
    }

    /// Ends a Pod with all its containers.
    pub fn remove_pod(&mut self, pod: &Pod) -> Result<()> {
        let request = StopPodSandboxRequest { pod_sandbox_id: pod.id.clone() };
        self.runtime.block_on(self.client.stop_pod_sandbox(request)).map_err(said)?;
        let request = RemovePodSandboxRequest { pod_sandbox_id: pod.id.clone() };
        self.runtime.block_on(self.client.remove_pod_sandbox(request)).map_err(said)?;
        let _ = std::fs::remove_dir_all(&pod.config.log_directory);
        Ok(())
    }
}

/// The UID of every Pod that this process runs.
pub fn pod_uid() -> String {
    format!("5eed0000-0000-4000-8000-{:012}", std::process::id())
}

/// What the kubelet would show.
#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn said(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}
