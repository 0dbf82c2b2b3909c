//! What can be wrong with a grant. Each message says the fault; [`crate::annotation::AnnotationError`] adds where it
//! came from, and [`GrantError::remedy`] what to do.

use thiserror::Error;

use crate::MAX_GRANT_BYTES;

/// A grant that can't be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GrantError {
    /// The text has more than [`MAX_GRANT_BYTES`] bytes.
    #[error("the text has {bytes} bytes, more than the {MAX_GRANT_BYTES} allowed")]
    TooLong {
        /// The length found.
        bytes: usize,
    },
    /// Nothing but white space.
    #[error("the text is empty")]
    Empty,
    /// Not JSON, or JSON of another shape; the text is serde_json's, which names the field, line and column.
    #[error("not a grant in JSON: {0}")]
    Json(String),
    /// A version other than 1.
    #[error("grant version {0} is not known, only 1 is")]
    Version(u64),
    /// `containers` names nobody.
    #[error("the grant names no container")]
    NoContainers,
    /// A container name that Kubernetes would not take (RFC 1123 label).
    #[error("\"{0}\" is not a container name")]
    ContainerName(String),
    /// A container with an empty list of shares.
    #[error("container \"{container}\" is named with no share")]
    NoShares {
        /// Its name.
        container: String,
    },
    /// The same GPU twice for one container.
    #[error("container \"{container}\" is given GPU {gpu} twice")]
    DuplicateGpu {
        /// The container's name.
        container: String,
        /// The GPU as written.
        gpu: String,
    },
    /// A share of no memory.
    #[error("the share of GPU {gpu} has no memory")]
    ZeroMemory {
        /// The GPU as written.
        gpu: String,
    },
    /// More memory than any GPU has.
    #[error("the share of GPU {gpu} has {mib} MiB, more than any GPU")]
    TooMuchMemory {
        /// The GPU as written.
        gpu: String,
        /// The amount.
        mib: u64,
    },
    /// A percentage outside 1 to 100.
    #[error("the share of GPU {gpu} has {percent} percent of compute, outside 1 to 100")]
    Percent {
        /// The GPU as written.
        gpu: String,
        /// The amount.
        percent: u64,
    },
    /// A GPU that is neither an index nor a UUID.
    #[error("\"{0}\" names no GPU: neither an index nor a GPU-… or MIG-… UUID")]
    Gpu(String),
    /// A GPU by index where only a UUID will do.
    #[error("GPU {0} is named by index; a grant in JSON names GPUs by UUID")]
    IndexInJson(String),
    /// A share in the short form without its `=`.
    #[error("\"{0}\" is not a share: no \"=\" between GPU and memory")]
    NotAShare(String),
    /// An amount of memory that can't be read.
    #[error("\"{0}\" is not an amount of memory")]
    Size(String),
    /// A percentage that can't be read.
    #[error("\"{0}\" is not a percentage")]
    NotAPercentage(String),
}

impl GrantError {
    /// What the reader can do about it, as half a sentence.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::TooLong { .. } => "shorten it; a grant names only the containers of one Pod",
            Self::Empty | Self::NoContainers => "remove the annotation if no GPU is wanted, or name a share in it",
            Self::Json(_) | Self::ContainerName(_) => {
                "write {\"version\":1,\"containers\":{\"NAME\":[{\"gpu\":\"GPU-uuid\",\"memoryMiB\":8192}]}}"
            }
            Self::Version(_) => "use an extender of the same release as this node",
            Self::NoShares { .. } => "leave the container out if it gets no GPU",
            Self::DuplicateGpu { .. } => "name each GPU once, with the sum of its memory",
            Self::ZeroMemory { .. } | Self::TooMuchMemory { .. } | Self::Size(_) => {
                "give a memory size such as 8GiB, 4096MiB or 4096 (MiB)"
            }
            Self::Percent { .. } | Self::NotAPercentage(_) => "give a percentage from 1 to 100, or none for no limit",
            Self::Gpu(_) | Self::IndexInJson(_) => "take a UUID from `gpufence inventory`",
            Self::NotAShare(_) => "write GPU=MEMORY, such as 0=8GiB, comma-separated for several",
        }
    }
}
