//! The short form of a grant, for standalone hosts: `0=8GiB@50%,GPU-…=4096MiB`.

use crate::{GpuReference, Grant, GrantError, MAX_GRANT_BYTES, Recipients, Share, check_shares, size};

/// Reads the short form. It gives its shares to whichever container carries it.
pub fn parse(text: &str) -> Result<Grant, GrantError> {
    if text.len() > MAX_GRANT_BYTES {
        return Err(GrantError::TooLong { bytes: text.len() });
    }
    if text.trim().is_empty() {
        return Err(GrantError::Empty);
    }
    let shares = text.split(',').map(|share| parse_share(share.trim())).collect::<Result<Vec<_>, _>>()?;
    check_shares("this", &shares)?;
    Ok(Grant { pod_uid: None, node: None, issued_at: None, mode: None, recipients: Recipients::Bearer(shares) })
}

fn parse_share(text: &str) -> Result<Share, GrantError> {
    let (gpu, amount) = text.split_once('=').ok_or_else(|| GrantError::NotAShare(text.chars().take(80).collect()))?;
    let gpu = GpuReference::parse(gpu.trim())?;
    let (memory, percent) = match amount.split_once('@') {
        Some((memory, percent)) => (memory, Some(parse_percent(&gpu, percent.trim())?)),
        None => (amount, None),
    };
    Ok(Share { gpu, memory_mib: size::parse_mib(memory)?, compute_percent: percent })
}

fn parse_percent(gpu: &GpuReference, text: &str) -> Result<u8, GrantError> {
    let refuse = || GrantError::NotAPercentage(text.chars().take(80).collect());
    let number = text.strip_suffix('%').ok_or_else(refuse)?.trim_end();
    if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
        return Err(refuse());
    }
    let percent: u64 = number.parse().map_err(|_| refuse())?;
    u8::try_from(percent)
        .ok()
        .filter(|percent| (1..=100).contains(percent))
        .ok_or_else(|| GrantError::Percent { gpu: gpu.to_string(), percent })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(text: &str) -> Vec<Share> {
        match parse(text).unwrap().recipients {
            Recipients::Bearer(shares) => shares,
            Recipients::Named(_) => panic!("the short form names no containers"),
        }
    }

    #[test]
    fn reads_shares() {
        let share = |gpu, memory_mib, compute_percent| Share { gpu, memory_mib, compute_percent };
        assert_eq!(shares("0=8GiB"), [share(GpuReference::Index(0), 8192, None)]);
        assert_eq!(
            shares(" 0 = 8GiB@50% , GPU-5f4d0c7e-0001=4096 "),
            [
                share(GpuReference::Index(0), 8192, Some(50)),
                share(GpuReference::Uuid("GPU-5f4d0c7e-0001".into()), 4096, None)
            ]
        );
    }

    #[test]
    fn refuses() {
        for (text, error) in [
            ("", GrantError::Empty),
            (" ", GrantError::Empty),
            ("0", GrantError::NotAShare("0".into())),
            ("0=1GiB,", GrantError::NotAShare(String::new())),
            ("=1GiB", GrantError::Gpu(String::new())),
            ("0=", GrantError::Size(String::new())),
            ("0=8GB", GrantError::Size("8GB".into())),
            ("0=0", GrantError::ZeroMemory { gpu: "0".into() }),
            ("0=1GiB@101%", GrantError::Percent { gpu: "0".into(), percent: 101 }),
            ("0=1GiB@0%", GrantError::Percent { gpu: "0".into(), percent: 0 }),
            ("0=1GiB@300%", GrantError::Percent { gpu: "0".into(), percent: 300 }),
            ("0=1GiB@50", GrantError::NotAPercentage("50".into())),
            ("0=1GiB@%", GrantError::NotAPercentage("%".into())),
            ("0=1GiB,0=2GiB", GrantError::DuplicateGpu { container: "this".into(), gpu: "0".into() }),
            ("all=1GiB", GrantError::Gpu("all".into())),
            ("0=1073741825", GrantError::TooMuchMemory { gpu: "0".into(), mib: 1_073_741_825 }),
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
        let long = "0=1,".repeat(20_000);
        assert_eq!(parse(&long), Err(GrantError::TooLong { bytes: long.len() }));
    }

    proptest! {
        #[test]
        fn never_panics_and_never_gives_nothing(text in ".{0,200}") {
            if let Ok(grant) = parse(&text) {
                prop_assert!(!grant.shares_of("any").is_empty());
            }
        }
    }
}
