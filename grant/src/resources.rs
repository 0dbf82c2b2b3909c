//! The extended resources by which Pods ask for GPUs and nodes tell how many there are.

/// Memory in MiB, of all GPUs of a container together.
pub const GPU_MEMORY: &str = "gpufence.dev/gpu-memory";
/// Compute in percent of one GPU, of all GPUs of a container together.
pub const GPU_COMPUTE: &str = "gpufence.dev/gpu-compute";
/// How many GPUs a container's memory is divided among; without memory, whole GPUs.
pub const GPU_COUNT: &str = "gpufence.dev/gpu-count";
/// What the resource of a MIG profile begins with, as in `gpufence.dev/mig-1g.10gb`.
pub const MIG_PREFIX: &str = "gpufence.dev/mig-";

/// gpushare's memory, in GiB, or MiB on nodes that say so.
pub const GPUSHARE_MEMORY: &str = "aliyun.com/gpu-mem";
/// gpushare's compute, in percent.
pub const GPUSHARE_COMPUTE: &str = "aliyun.com/gpu-core.percentage";
/// gpushare's count.
pub const GPUSHARE_COUNT: &str = "aliyun.com/gpu-count";

/// Label on a Node whose `aliyun.com/gpu-mem` counts in another unit than the extender's own: `GiB` or `MiB`.
pub const GPUSHARE_UNIT_LABEL: &str = "gpufence.dev/gpu-mem-unit";
/// Label on a Node whose memory is overcommitted by another factor than the extender's own, such as `1.5`.
pub const OVERCOMMIT_LABEL: &str = "gpufence.dev/memory-overcommit";
/// Label on a Node with the model of its GPUs, where they are all of one.
pub const MODEL_LABEL: &str = "gpufence.dev/gpu-model";

/// Annotation by which a Pod wants GPUs of certain models, comma-separated. What a Pod's author may set isn't under
/// `gpufence.dev/`, where only the extender writes.
pub const WANTED_MODEL: &str = "scheduling.gpufence.dev/gpu-model";
/// Annotation by which a Pod chooses among the GPUs of a node: `binpack`, `spread` or `balanced`.
pub const WANTED_GPU_POLICY: &str = "scheduling.gpufence.dev/gpu-policy";
/// Annotation by which a Pod chooses among nodes: the same.
pub const WANTED_NODE_POLICY: &str = "scheduling.gpufence.dev/node-policy";
/// Annotation by which a Pod wants GPUs that are shared by MPS: `mps`.
pub const WANTED_MODE: &str = "scheduling.gpufence.dev/mode";
