//! A GPU's DRM nodes, from `/sys/bus/pci/devices/<PCI address>/drm`.

use crate::{error::CdiError, root::Root};

/// The names of a GPU's DRM nodes with major and minor, such as `card1` (226, 1) and `renderD128` (226, 128).
pub fn drm_nodes(root: &Root, pci_address: &str) -> Result<Vec<(String, u32, u32)>, CdiError> {
    let folder = format!("/sys/bus/pci/devices/{pci_address}/drm");
    let mut nodes = Vec::new();
    for name in root.list(&folder)? {
        let name = name.to_string_lossy().into_owned();
        if !name.starts_with("card") && !name.starts_with("renderD") {
            continue;
        }
        let path = format!("{folder}/{name}/dev");
        let text = root.read_text(&path)?;
        let numbers =
            text.trim().split_once(':').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        let (major, minor) = numbers.ok_or_else(|| CdiError::Malformed {
            path: root.host_path(&path),
            what: format!("\"{}\" is not MAJOR:MINOR", text.trim()),
        })?;
        nodes.push((name, major, minor));
    }
    Ok(nodes)
}
