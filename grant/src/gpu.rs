//! How a grant names a GPU.

use std::fmt;

use crate::GrantError;

/// A GPU or MIG instance, as written in a grant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GpuReference {
    /// The position in the inventory, in order of PCI address, from 0. Not the device minor.
    Index(u32),
    /// A UUID: `GPU-…` of a whole GPU or `MIG-…` of a MIG instance.
    Uuid(String),
}

impl GpuReference {
    /// Reads an index ("0") or a UUID ("GPU-5f…", "MIG-…").
    pub fn parse(text: &str) -> Result<Self, GrantError> {
        let refuse = || GrantError::Gpu(text.chars().take(80).collect());
        if let Some(rest) = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-")) {
            // NVML's older MIG form is MIG-GPU-<uuid>/<gpu instance>/<compute instance>.
            let plain = rest.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '/'));
            if rest.len() < 8 || rest.len() > 64 || !plain {
                return Err(refuse());
            }
            return Ok(Self::Uuid(text.to_owned()));
        }
        let canonical = text == "0" || (!text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit()));
        if text.is_empty() || !canonical {
            return Err(refuse());
        }
        text.parse().ok().filter(|index| *index < 1024).map(Self::Index).ok_or_else(refuse)
    }
}

impl fmt::Display for GpuReference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(formatter, "{index}"),
            Self::Uuid(uuid) => formatter.write_str(uuid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_indices_and_uuids() {
        let uuid = "GPU-5f4d0c7e-4b2a-4c7e-9c1e-0d6c2c6f0001";
        assert_eq!(GpuReference::parse("0"), Ok(GpuReference::Index(0)));
        assert_eq!(GpuReference::parse("15"), Ok(GpuReference::Index(15)));
        assert_eq!(GpuReference::parse(uuid), Ok(GpuReference::Uuid(uuid.into())));
        let old_mig = "MIG-GPU-5f4d0c7e-4b2a-4c7e-9c1e-0d6c2c6f0001/3/0";
        assert_eq!(GpuReference::parse(old_mig), Ok(GpuReference::Uuid(old_mig.into())));
    }

    #[test]
    fn refuses_everything_else() {
        for text in [
            "",
            "-1",
            "+1",
            "01",
            "1024",
            "0x1",
            "all",
            "GPU-",
            "GPU-short",
            "gpu-5f4d0c7e",
            "GPU-5f4d 0c7e",
            "GPU-../../etc",
            "99999999999",
        ] {
            assert_eq!(GpuReference::parse(text), Err(GrantError::Gpu(text.into())), "{text}");
        }
    }
}
