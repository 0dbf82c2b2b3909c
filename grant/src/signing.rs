//! Private keys: PKCS#8 in PEM, as `openssl genpkey -algorithm ed25519` writes them too.

use ed25519_dalek::{
    Signer, SigningKey,
    pkcs8::{DecodePrivateKey, EncodePrivateKey, KeypairBytes, spki::der::pem::LineEnding},
};

use crate::signature::{PublicKey, SignatureError, written};

/// A key that signs grants.
pub struct PrivateKey {
    key: SigningKey,
    public: PublicKey,
}

impl PrivateKey {
    /// A new one, from the kernel's random numbers.
    pub fn generate() -> Result<Self, SignatureError> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|error| SignatureError::Key(format!("no random numbers: {error}")))?;
        Ok(Self::of(SigningKey::from_bytes(&seed)))
    }

    fn of(key: SigningKey) -> Self {
        let public = PublicKey::of(key.verifying_key());
        Self { key, public }
    }

    /// Reads one from PEM.
    pub fn from_pem(text: &str) -> Result<Self, SignatureError> {
        // The text is secret and isn't repeated.
        let refuse = |error| SignatureError::Key(format!("PKCS#8 in PEM: {error}"));
        SigningKey::from_pkcs8_pem(text.trim_start()).map(Self::of).map_err(refuse)
    }

    /// Writes it as PEM, secret as it is.
    pub fn to_pem(&self) -> Result<String, SignatureError> {
        // Without the public half, which older OpenSSL doesn't take.
        let key = KeypairBytes { secret_key: self.key.to_bytes(), public_key: None };
        let pem = key.to_pkcs8_pem(LineEnding::LF);
        pem.map(|pem| pem.to_string()).map_err(|error| SignatureError::Key(format!("PKCS#8 in PEM: {error}")))
    }

    /// The public half.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// The signature of a text: `ed25519:<key id>:<base64>`.
    pub fn sign(&self, text: &str) -> String {
        written(self.public.id(), &self.key.sign(text.as_bytes()).to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signature::Keyring;

    #[test]
    fn signs_for_who_has_the_public_key() {
        let (ours, other) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
        let again = PrivateKey::from_pem(&ours.to_pem().unwrap()).unwrap();
        assert_eq!(again.public(), ours.public());
        let text = r#"{"version":1}"#;
        let signature = again.sign(text);
        let ring = Keyring::new([ours.public().clone()]);
        ring.verify(text, &signature).unwrap();
        // Edited by one byte.
        assert_eq!(ring.verify(r#"{"version":2}"#, &signature), Err(SignatureError::Wrong));
        // Another's signature under our key's id, and under its own.
        let forged = other.sign(text).replace(other.public().id(), ours.public().id());
        assert_eq!(ring.verify(text, &forged), Err(SignatureError::Wrong));
        assert!(matches!(ring.verify(text, &other.sign(text)), Err(SignatureError::UnknownKey { .. })));
        // While keys are rotated both hold.
        let both = Keyring::new([ours.public().clone(), other.public().clone()]);
        both.verify(text, &signature).unwrap();
        both.verify(text, &other.sign(text)).unwrap();
    }

    #[test]
    fn what_is_no_key() {
        for text in ["", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"] {
            assert!(PrivateKey::from_pem(text).is_err(), "{text}");
        }
    }
}
