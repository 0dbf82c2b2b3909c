//! Amounts of memory with their units.

use crate::GrantError;

/// The most that a share may say, in MiB: 1 PiB, far beyond any GPU, so that later sums in bytes can't overflow.
pub const MAX_MEMORY_MIB: u64 = 1 << 30;

/// Reads an amount of memory and gives it in MiB.
///
/// A bare number is MiB; `MiB` and `GiB` may follow, with or without a space. Kubernetes' `Mi` and `Gi` are taken too.
/// Decimal units (`MB`, `GB`) are refused, since users of GPUs mean either by them.
pub fn parse_mib(text: &str) -> Result<u64, GrantError> {
    let refuse = || GrantError::Size(text.chars().take(80).collect());
    let trimmed = text.trim();
    let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = trimmed.split_at(digits);
    let factor: u64 = match unit.trim_start() {
        "" | "MiB" | "Mi" => 1,
        "GiB" | "Gi" => 1024,
        _ => return Err(refuse()),
    };
    let number: u64 = number.parse().map_err(|_| refuse())?;
    number.checked_mul(factor).ok_or_else(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        for (text, mib) in [
            ("8GiB", 8192),
            ("8 GiB", 8192),
            ("8Gi", 8192),
            ("4096MiB", 4096),
            ("4096Mi", 4096),
            ("4096", 4096),
            (" 1 ", 1),
            ("0", 0),
        ] {
            assert_eq!(parse_mib(text), Ok(mib), "{text}");
        }
    }

    #[test]
    fn refusals() {
        for text in [
            "",
            "GiB",
            "8GB",
            "8gib",
            "1.5GiB",
            "-1",
            "8GiB8",
            "0x10",
            "18446744073709551615GiB",
            "99999999999999999999",
        ] {
            assert_eq!(parse_mib(text), Err(GrantError::Size(text.into())), "{text}");
        }
    }
}
