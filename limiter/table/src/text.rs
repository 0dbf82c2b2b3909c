//! Numbers and words in small buffers, where nothing may be allocated.

/// A text of at most `N` bytes; what doesn't fit is cut.
#[derive(Debug, Clone, Copy)]
pub struct Text<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Self { bytes: [0; N], length: 0 }
    }
}

impl<const N: usize> Text<N> {
    /// Adds bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        let room = &mut self.bytes[self.length..];
        let count = bytes.len().min(room.len());
        room[..count].copy_from_slice(&bytes[..count]);
        self.length += count;
    }

    /// Adds a number in decimal.
    pub fn push_number(&mut self, number: u64) {
        let mut digits = [0_u8; 20];
        let mut start = digits.len();
        let mut rest = number;
        loop {
            start -= 1;
            digits[start] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.push(&digits[start..]);
    }

    /// What it holds.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// A whole decimal number and nothing else.
pub fn number(bytes: &[u8]) -> Option<u64> {
    if bytes.is_empty() || bytes.len() > 20 {
        return None;
    }
    bytes.iter().try_fold(0_u64, |sum, byte| {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit < 10)?;
        sum.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// `GPU-` or `MIG-` and the sixteen bytes of a UUID, as NVIDIA's tools write them.
pub fn uuid(bytes: &[u8; 16], start: &[u8]) -> Text<48> {
    let mut text = Text::default();
    text.push(start);
    for (position, byte) in bytes.iter().enumerate() {
        if matches!(position, 4 | 6 | 8 | 10) {
            text.push(b"-");
        }
        let digit = |value: u8| if value < 10 { b'0' + value } else { b'a' + value - 10 };
        text.push(&[digit(byte >> 4), digit(byte & 15)]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_uuids() {
        let mut text = Text::<30>::default();
        text.push(b"a ");
        text.push_number(0);
        text.push_number(u64::MAX);
        assert_eq!(text.as_bytes(), b"a 018446744073709551615");
        text.push(b" and more than there is room for");
        assert_eq!(text.as_bytes().len(), 30);
        assert_eq!(number(b"18446744073709551615"), Some(u64::MAX));
        for wrong in [&b"18446744073709551616"[..], b"", b"-1", b"1 ", b"000000000000000000001"] {
            assert_eq!(number(wrong), None);
        }
        let bytes = [0x5f, 0x4d, 0x0c, 0x7e, 0x4b, 0x2a, 0x4c, 0x7e, 0x9c, 0x1e, 0x0d, 0x6c, 0x2c, 0x6f, 0x00, 0x01];
        assert_eq!(uuid(&bytes, b"GPU-").as_bytes(), b"GPU-5f4d0c7e-4b2a-4c7e-9c1e-0d6c2c6f0001");
    }
}
