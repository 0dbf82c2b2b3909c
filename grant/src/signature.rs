//! Signatures of grants: Ed25519 over the exact bytes of the annotation, and the public keys that verify them.
//!
//! A signature is written `ed25519:<key id>:<base64>`, a public key `ed25519:<key id>:<base64 of its 32 bytes>`. A key's id
//! follows from the key, so that two keys can't go by one name: the first 16 hexadecimal digits of its SHA-256.

use std::{fmt, fs, io, path::Path};

use base64ct::{Base64, Encoding};
use ed25519_dalek::{Signature, VerifyingKey};
use sha2::{Digest, Sha256};
use thiserror::Error;

/// What both forms begin with.
const ALGORITHM: &str = "ed25519";
/// No signature is longer: the algorithm, an id, 64 bytes in base64.
const MAX_SIGNATURE_BYTES: usize = 256;
/// How a file of public keys ends.
pub const KEY_FILE_ENDING: &str = "pub";

/// A signature that doesn't hold, or keys that can't be read.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SignatureError {
    /// Not of the form of a signature.
    #[error("the signature is not of the form ed25519:<key id>:<base64>")]
    Malformed,
    /// Signed with a key that isn't among ours.
    #[error("signed with key {id}, which is not accepted here ({accepted}): a retired key, or one not yet given")]
    UnknownKey {
        /// The key's id.
        id: String,
        /// The ids that are accepted.
        accepted: String,
    },
    /// The bytes aren't those that were signed.
    #[error("the signature doesn't match: the text was changed after it was signed, or the signature is another's")]
    Wrong,
    /// Not a public key.
    #[error("\"{0}\" is not a public key of the form ed25519:<key id>:<base64>")]
    Key(String),
    /// A public key under another's id.
    #[error("the public key called {written} is {id}")]
    KeyId {
        /// The id as written.
        written: String,
        /// The id that follows from the key.
        id: String,
    },
    /// A file or folder of keys can't be read.
    #[error("keys in {path}: {what}")]
    File {
        /// Its path.
        path: String,
        /// What is wrong.
        what: String,
    },
}

/// A key that verifies signatures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey {
    id: String,
    key: VerifyingKey,
}

impl PublicKey {
    /// Reads `ed25519:<key id>:<base64>`.
    pub fn parse(text: &str) -> Result<Self, SignatureError> {
        let refuse = || SignatureError::Key(text.chars().take(80).collect());
        let (written, bytes) = fields(text).ok_or_else(refuse)?;
        let bytes = <[u8; 32]>::try_from(bytes).map_err(|_| refuse())?;
        let key = VerifyingKey::from_bytes(&bytes).map_err(|_| refuse())?;
        // A key of small order verifies what nobody signed.
        if key.is_weak() {
            return Err(refuse());
        }
        let key = Self::of(key);
        if key.id == written { Ok(key) } else { Err(SignatureError::KeyId { written: written.to_owned(), id: key.id }) }
    }

    pub(crate) fn of(key: VerifyingKey) -> Self {
        let digest = Sha256::digest(key.as_bytes());
        let id = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Self { id, key }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{ALGORITHM}:{}:{}", self.id, Base64::encode_string(self.key.as_bytes()))
    }
}

/// The public keys that are accepted: while keys are rotated, the old one and the new one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keyring(Vec<PublicKey>);

impl Keyring {
    /// With these keys.
    pub fn new(keys: impl IntoIterator<Item = PublicKey>) -> Self {
        let mut ring = Self::default();
        keys.into_iter().for_each(|key| ring.add(key));
        ring
    }

    /// Adds one.
    pub fn add(&mut self, key: PublicKey) {
        if self.0.iter().all(|known| known.id != key.id) {
            self.0.push(key);
        }
    }

    /// Adds the keys of every `*.pub` file in a folder: one in each line, `#` begins a comment. A folder that isn't there
    /// has none.
    pub fn add_folder(&mut self, folder: &Path) -> Result<(), SignatureError> {
        let error = |path: &Path, what: String| SignatureError::File { path: path.display().to_string(), what };
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(error(folder, source.to_string())),
        };
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(|source| error(folder, source.to_string()))?.path();
            if path.extension().is_some_and(|ending| ending == KEY_FILE_ENDING) {
                files.push(path);
            }
        }
        files.sort();
        for file in files {
            let text = fs::read_to_string(&file).map_err(|source| error(&file, source.to_string()))?;
            for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
                if !line.is_empty() {
                    self.add(PublicKey::parse(line).map_err(|source| error(&file, source.to_string()))?);
                }
            }
        }
        Ok(())
    }

    /// Whether it has no key.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ids, in words.
    pub fn ids(&self) -> String {
        match self.0.as_slice() {
            [] => "no key is".into(),
            keys => keys.iter().map(PublicKey::id).collect::<Vec<_>>().join(", "),
        }
    }

    /// Holds a signature against the text that it is of.
    pub fn verify(&self, text: &str, signature: &str) -> Result<(), SignatureError> {
        if signature.len() > MAX_SIGNATURE_BYTES {
            return Err(SignatureError::Malformed);
        }
        let (id, bytes) = fields(signature).ok_or(SignatureError::Malformed)?;
        let bytes = <[u8; 64]>::try_from(bytes).map_err(|_| SignatureError::Malformed)?;
        let key = self
            .0
            .iter()
            .find(|key| key.id == id)
            .ok_or_else(|| SignatureError::UnknownKey { id: id.to_owned(), accepted: self.ids() })?;
        key.key.verify_strict(text.as_bytes(), &Signature::from_bytes(&bytes)).map_err(|_| SignatureError::Wrong)
    }
}

/// The id and the bytes of `ed25519:<id>:<base64>`.
fn fields(text: &str) -> Option<(&str, Vec<u8>)> {
    let (id, base64) = text.strip_prefix(ALGORITHM)?.strip_prefix(':')?.split_once(':')?;
    let is_id = id.len() == 16 && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_id.then(|| Base64::decode_vec(base64).ok()).flatten().map(|bytes| (id, bytes))
}

/// How a signature or a public key is written.
#[cfg(feature = "signing")]
pub(crate) fn written(id: &str, bytes: &[u8]) -> String {
    format!("{ALGORITHM}:{id}:{}", Base64::encode_string(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 8032, section 7.1, test 2: the message is the byte 0x72.
    const KEY: &str = "ed25519:39f713d0a644253f:PUAXw+hDiVqStwqnTRt+vJyYLM8uxJaMwM1V8Sr0Zgw=";
    const SIGNATURE: &str = "kqAJqfDUyrhyDoILX2QlQKKyez1B2sXXKj2pP2FVv2Q=";

    #[test]
    fn a_key_is_read_as_it_is_written() {
        assert_eq!(PublicKey::parse(KEY).unwrap().to_string(), KEY);
        for (text, expected) in [
            ("", "is not a public key"),
            ("rsa:39f713d0a644253f:AAAA", "is not a public key"),
            ("ed25519:39f713d0a644253f:", "is not a public key"),
            ("ed25519:39f713d0a644253f:AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "is not a public key"),
            (&KEY.replace("39f7", "39ff"), "is 39f713d0a644253f"),
            (&KEY.replace("39f7", "39F7"), "is not a public key"),
        ] {
            let error = PublicKey::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_no_signature() {
        let ring = Keyring::new([PublicKey::parse(KEY).unwrap()]);
        for text in ["", "ed25519", "ed25519::", "ed25519:39f713d0a644253f:!", &"a".repeat(300)] {
            assert_eq!(ring.verify("r", text), Err(SignatureError::Malformed), "{text}");
        }
        let short = format!("ed25519:39f713d0a644253f:{SIGNATURE}");
        assert_eq!(ring.verify("r", &short), Err(SignatureError::Malformed));
        let other = format!("ed25519:0000000000000000:{}", Base64::encode_string(&[0; 64]));
        let error = ring.verify("r", &other).unwrap_err().to_string();
        assert!(error.contains("0000000000000000, which is not accepted here (39f713d0a644253f)"), "{error}");
        assert!(Keyring::default().verify("r", &other).unwrap_err().to_string().contains("(no key is)"));
    }

    #[test]
    fn keys_from_a_folder() {
        let folder = std::env::temp_dir().join(format!("gpufence-keys-{}", std::process::id()));
        let read = |folder: &Path| {
            let mut ring = Keyring::default();
            ring.add_folder(folder).map(|()| ring)
        };
        assert!(read(&folder).unwrap().is_empty());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("a.pub"), format!("# the first\n{KEY} # since January\n\n{KEY}\n")).unwrap();
        fs::write(folder.join("a.key"), "nothing to us").unwrap();
        assert_eq!(read(&folder).unwrap().ids(), "39f713d0a644253f");
        fs::write(folder.join("b.pub"), "ed25519").unwrap();
        let error = read(&folder).unwrap_err().to_string();
        fs::remove_dir_all(&folder).unwrap();
        assert!(error.contains("b.pub: \"ed25519\" is not a public key"), "{error}");
    }
}
