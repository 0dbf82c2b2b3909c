//! A machine in a few words, such as `gpus=2 mig=0:2 old-driver=535.247.01 no-uvm excluded=1`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

/// A machine to simulate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// How many GPUs.
    pub gpus: u32,
    /// GPUs by number in MIG mode, with how many instances each.
    pub mig: Vec<(u32, u32)>,
    /// GPUs that the driver was told to leave alone.
    pub excluded: Vec<u32>,
    /// The running driver's version.
    pub driver: String,
    /// Another version whose files lie beside it.
    pub old_driver: Option<String>,
    /// Whether the module nvidia-uvm is loaded.
    pub uvm: bool,
    /// A folder with NVIDIA's own libraries of the running version, which then take the stand-ins' place.
    pub real: Option<PathBuf>,
    /// Each GPU's memory in MiB, as its NVML stand-in says.
    pub memory_mib: u64,
}

impl Default for Description {
    fn default() -> Self {
        Self {
            gpus: 2,
            mig: Vec::new(),
            excluded: Vec::new(),
            driver: "550.163.01".into(),
            old_driver: None,
            uvm: true,
            real: None,
            memory_mib: 81920,
        }
    }
}

impl Description {
    /// Reads words such as `gpus=2`.
    pub fn parse<S: AsRef<str>>(words: &[S]) -> Result<Self> {
        let mut description = Self::default();
        let number = |text: &str| text.parse::<u32>().with_context(|| format!("\"{text}\" is not a number"));
        for word in words.iter().flat_map(|words| words.as_ref().split_whitespace()) {
            match word.split_once('=') {
                Some(("gpus", count)) => description.gpus = number(count)?,
                Some(("mig", value)) => {
                    let (gpu, count) = value.split_once(':').with_context(|| format!("{word}: write mig=GPU:COUNT"))?;
                    description.mig.push((number(gpu)?, number(count)?));
                }
                Some(("excluded", gpu)) => description.excluded.push(number(gpu)?),
                Some(("driver", version)) => description.driver = version.into(),
                Some(("old-driver", version)) => description.old_driver = Some(version.into()),
                Some(("real", folder)) => description.real = Some(folder.into()),
                Some(("memory", mib)) => description.memory_mib = number(mib)?.into(),
                None if word == "no-uvm" => description.uvm = false,
                _ => bail!(
                    "\"{word}\" is not known; write gpus=N, mig=GPU:COUNT, excluded=GPU, driver=VERSION, old-driver=VERSION, memory=MIB, real=FOLDER or no-uvm"
                ),
            }
        }
        if description.gpus > 64 {
            bail!("{} GPUs are too many; 64 at most", description.gpus);
        }
        Ok(description)
    }

    /// The UUID of a GPU, the same at every build.
    pub fn uuid(&self, gpu: u32) -> String {
        format!("GPU-5eed0000-0000-4000-8000-{gpu:012}")
    }

    /// The UUID of a MIG instance, known to NVML only.
    pub fn mig_uuid(&self, gpu: u32, instance: u32) -> String {
        format!("MIG-5eed0000-0000-4000-8{gpu:03}-{instance:012}")
    }

    /// A GPU's PCI address.
    pub fn pci_address(&self, gpu: u32) -> String {
        format!("0000:{:02x}:00.0", gpu + 1)
    }

    /// How many MIG instances a GPU has.
    pub fn instances(&self, gpu: u32) -> u32 {
        self.mig.iter().filter(|(of, _)| *of == gpu).map(|(_, count)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        let description = Description::parse(&["gpus=4 mig=1:2", "no-uvm", "old-driver=535.1 excluded=3"]).unwrap();
        let expected = Description {
            gpus: 4,
            mig: vec![(1, 2)],
            excluded: vec![3],
            old_driver: Some("535.1".into()),
            uvm: false,
            ..Description::default()
        };
        assert_eq!(description, expected);
        assert_eq!(description.instances(1), 2);
        for wrong in ["gpus=x", "mig=1", "gpus=65", "uvm"] {
            assert!(Description::parse(&[wrong]).is_err(), "{wrong}");
        }
    }
}
