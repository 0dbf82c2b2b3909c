//! Driver capabilities: which parts of the driver a container gets.

use std::{collections::BTreeSet, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// One driver capability, in NVIDIA's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverCapability {
    /// CUDA and OpenCL.
    Compute,
    /// nvidia-smi and NVML.
    Utility,
    /// The Video Codec SDK.
    Video,
    /// OpenGL, EGL and Vulkan.
    Graphics,
    /// X11 on the GPU.
    Display,
    /// NGX.
    Ngx,
    /// The 32-bit libraries of the others.
    Compat32,
}

/// A set of driver capabilities.
pub type DriverCapabilities = BTreeSet<DriverCapability>;

impl DriverCapability {
    /// All of them, in the order of NVIDIA's documentation.
    pub const ALL: [Self; 7] =
        [Self::Compute, Self::Utility, Self::Video, Self::Graphics, Self::Display, Self::Ngx, Self::Compat32];

    /// The word for it, which names its folder in the stage too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Utility => "utility",
            Self::Video => "video",
            Self::Graphics => "graphics",
            Self::Display => "display",
            Self::Ngx => "ngx",
            Self::Compat32 => "compat32",
        }
    }

    /// Which capability the 64-bit library `stem` belongs to: the file name up to `.so`, such as `libcuda`.
    ///
    /// A library of a later driver that stands in no list goes to compute, so that what it needs is never missing.
    pub fn of_library(stem: &str) -> Self {
        const UTILITY: [&str; 4] = ["libnvidia-ml", "libnvidia-cfg", "libnvidia-nscq", "libnvidia-sandboxutils"];
        const VIDEO: [&str; 4] = ["libnvcuvid", "libnvidia-encode", "libnvidia-opticalflow", "libvdpau_nvidia"];
        const GRAPHICS: [&str; 18] = [
            "libnvidia-eglcore",
            "libnvidia-glcore",
            "libnvidia-tls",
            "libnvidia-glsi",
            "libnvidia-fbc",
            "libnvidia-rtcore",
            "libnvoptix",
            "libnvidia-glvkspirv",
            "libnvidia-vulkan-producer",
            "libnvidia-vksc-core",
            "libGLX_nvidia",
            "libEGL_nvidia",
            "libGLESv2_nvidia",
            "libGLESv1_CM_nvidia",
            "libnvidia-ifr",
            "libnvidia-cbl",
            "libnvidia-gtk2",
            "libnvidia-gtk3",
        ];
        if UTILITY.contains(&stem) {
            Self::Utility
        } else if VIDEO.contains(&stem) {
            Self::Video
        } else if GRAPHICS.contains(&stem) || stem.starts_with("libnvidia-egl-") || stem == "libnvidia-api" {
            Self::Graphics
        } else if stem.starts_with("libnvidia-ngx") {
            Self::Ngx
        } else if stem == "libglxserver_nvidia" || stem == "nvidia_drv" {
            Self::Display
        } else {
            Self::Compute
        }
    }
}

impl fmt::Display for DriverCapability {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for DriverCapability {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|capability| capability.name() == text).ok_or_else(|| {
            format!(
                "\"{text}\" is not a driver capability: compute, utility, video, graphics, display, ngx or compat32"
            )
        })
    }
}

/// Reads `NVIDIA_DRIVER_CAPABILITIES` as an image or Pod may set it: a comma-separated list, `all`, or empty.
///
/// It chooses, it doesn't grant: what policy doesn't allow is left out, and words that nobody knows are ignored, since
/// the text comes from the image. `None` where it says nothing usable.
pub fn requested(text: &str, allowed: &DriverCapabilities) -> Option<DriverCapabilities> {
    let mut wanted = DriverCapabilities::new();
    for word in text.split(',').map(str::trim) {
        if word == "all" {
            wanted.extend(allowed);
        } else if let Ok(capability) = word.parse() {
            wanted.insert(capability);
        }
    }
    let usable: DriverCapabilities = wanted.intersection(allowed).copied().collect();
    (!usable.is_empty()).then_some(usable)
}

#[cfg(test)]
mod tests {
    use DriverCapability::{Compute, Graphics, Ngx, Utility, Video};

    use super::*;

    #[test]
    fn libraries() {
        for (stem, expected) in [
            ("libcuda", Compute),
            ("libnvidia-ml", Utility),
            ("libnvcuvid", Video),
            ("libGLX_nvidia", Graphics),
            ("libnvidia-egl-wayland2", Graphics),
            ("libnvidia-ngx", Ngx),
            ("libnvidia-of-next-year", Compute),
        ] {
            assert_eq!(DriverCapability::of_library(stem), expected, "{stem}");
        }
    }

    #[test]
    fn requests_stay_within_what_is_allowed() {
        let allowed = DriverCapabilities::from([Compute, Utility]);
        assert_eq!(requested("all", &allowed), Some(allowed.clone()));
        assert_eq!(requested("compute, graphics", &allowed), Some([Compute].into()));
        assert_eq!(requested("graphics", &allowed), None);
        assert_eq!(requested("", &allowed), None);
        assert_eq!(requested("nonsense,utility", &allowed), Some([Utility].into()));
    }
}
