//! How the extender chooses, unless a Pod or a node says otherwise.

use std::{fmt, str::FromStr};

use k8s_openapi::api::core::v1::Node;

use gpufence_grant::resources::{GPUSHARE_UNIT_LABEL, OVERCOMMIT_LABEL};

/// Which of several places is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// The fullest, so that others stay free for what is large.
    #[default]
    Binpack,
    /// The emptiest, so that neighbours disturb each other least.
    Spread,
    /// The one where memory and compute are used up alike afterwards.
    Balanced,
}

impl FromStr for Packing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "binpack" => Ok(Self::Binpack),
            "spread" => Ok(Self::Spread),
            "balanced" => Ok(Self::Balanced),
            other => Err(format!("\"{other:.40}\" is no way of choosing; write binpack, spread or balanced")),
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Binpack => "binpack",
            Self::Spread => "spread",
            Self::Balanced => "balanced",
        })
    }
}

/// A factor in thousandths, 1.0 to 16.0: how much more memory is granted than there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overcommit(u64);

impl Overcommit {
    /// What may be granted of so much.
    pub const fn of(self, memory_mib: u64) -> u64 {
        memory_mib.saturating_mul(self.0) / 1000
    }
}

impl Default for Overcommit {
    fn default() -> Self {
        Self(1000)
    }
}

impl FromStr for Overcommit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let factor: f64 = text.parse().map_err(|_| format!("\"{text:.40}\" is not a number such as 1.5"))?;
        if !(1.0..=16.0).contains(&factor) {
            return Err(format!("{text:.40} is not between 1 and 16"));
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1000 to 16000")]
        Ok(Self((factor * 1000.0).round() as u64))
    }
}

/// The unit of `aliyun.com/gpu-mem`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unit {
    /// GiB.
    #[default]
    Gib,
    /// MiB.
    Mib,
}

impl FromStr for Unit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "GiB" => Ok(Self::Gib),
            "MiB" => Ok(Self::Mib),
            other => Err(format!("\"{other:.40}\" is no unit; write GiB or MiB")),
        }
    }
}

/// How the extender chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Choosing {
    /// Among nodes.
    pub nodes: Packing,
    /// Among the GPUs of one node.
    pub gpus: Packing,
    /// How much more memory is granted than there is.
    pub overcommit: Overcommit,
    /// What `aliyun.com/gpu-mem` counts.
    pub unit: Unit,
}

impl Choosing {
    /// The same with what a node's labels say.
    ///
    /// # Errors
    /// A label that can't be read, in words: the node isn't used until it is right.
    pub fn on(self, node: &Node) -> Result<Self, String> {
        fn read<T: FromStr<Err = String>>(node: &Node, label: &str, default: T) -> Result<T, String> {
            let text = node.metadata.labels.as_ref().and_then(|labels| labels.get(label));
            text.map_or(Ok(default), |text| text.parse().map_err(|what| format!("label {label}: {what}")))
        }
        Ok(Self {
            overcommit: read(node, OVERCOMMIT_LABEL, self.overcommit)?,
            unit: read(node, GPUSHARE_UNIT_LABEL, self.unit)?,
            ..self
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn labels_of_a_node() {
        let node = |labels| serde_json::from_value(json!({"metadata": {"name": "n", "labels": labels}})).unwrap();
        let choosing = Choosing::default();
        assert_eq!(choosing.on(&node(json!({}))), Ok(choosing));
        let said = choosing.on(&node(json!({(OVERCOMMIT_LABEL): "1.5", (GPUSHARE_UNIT_LABEL): "MiB"}))).unwrap();
        assert_eq!((said.overcommit.of(1001), said.unit), (1501, Unit::Mib));
        for (label, text, expected) in [
            (OVERCOMMIT_LABEL, "0.5", "0.5 is not between 1 and 16"),
            (OVERCOMMIT_LABEL, "NaN", "NaN is not between"),
            (OVERCOMMIT_LABEL, "much", "\"much\" is not a number"),
            (GPUSHARE_UNIT_LABEL, "GB", "write GiB or MiB"),
        ] {
            let error = choosing.on(&node(json!({(label): text}))).unwrap_err();
            assert!(error.contains(label) && error.contains(expected), "{error}");
        }
    }
}
