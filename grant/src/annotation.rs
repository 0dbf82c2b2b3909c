//! Which annotation carries a grant, and how one is read from a container's annotations.

use thiserror::Error;

use crate::{Grant, GrantError, json, short};

/// The grant in JSON, written by the extender.
pub const GRANT: &str = "gpufence.dev/grant";
/// The signature over the exact bytes of [`GRANT`]: `ed25519:<key id>:<base64>`.
pub const GRANT_SIGNATURE: &str = "gpufence.dev/grant-signature";
/// The short form, for standalone hosts.
pub const GPU: &str = "gpufence.dev/gpu";
/// What all our annotations begin with.
pub const PREFIX: &str = "gpufence.dev/";

/// A grant with the bytes that a signature of it covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnotatedGrant {
    /// What was granted.
    pub grant: Grant,
    /// Where it came from, in words: an annotation, or [`FIXED`].
    pub origin: &'static str,
    /// The exact text, which is what a signature signs.
    pub text: String,
    /// The text of [`GRANT_SIGNATURE`], not yet looked at.
    pub signature: Option<String>,
}

/// Annotations that carry no usable grant. Says which annotation, what is wrong and what to do.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum AnnotationError {
    /// The grant can't be read.
    #[error("{origin}: {source}; {}", source.remedy())]
    Unreadable {
        /// Where it came from.
        origin: &'static str,
        /// The fault.
        source: GrantError,
    },
    /// Both forms at once.
    #[error("annotations {GRANT} and {GPU} are both set; keep only one of them")]
    Both,
    /// An annotation of ours that this release doesn't know, such as a misspelt one.
    #[error("annotation {0} is not known; the annotations are {GRANT}, {GRANT_SIGNATURE} and {GPU}")]
    Unknown(String),
    /// A signature with nothing to sign.
    #[error("annotation {GRANT_SIGNATURE} is set without {GRANT}; set both or neither")]
    SignatureAlone,
}

/// Reads the grant from `annotations`, pairs of key and value. `None` where no annotation of ours is set.
pub fn read<'a>(
    annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Option<AnnotatedGrant>, AnnotationError> {
    let (mut grant, mut signature, mut gpu) = (None, None, None);
    for (key, value) in annotations {
        match key {
            GRANT => grant = Some(value),
            GRANT_SIGNATURE => signature = Some(value),
            GPU => gpu = Some(value),
            _ if key.starts_with(PREFIX) => return Err(AnnotationError::Unknown(key.chars().take(120).collect())),
            _ => {}
        }
    }
    let (origin, text, parsed) = match (grant, gpu) {
        (Some(_), Some(_)) => return Err(AnnotationError::Both),
        (None, _) if signature.is_some() => return Err(AnnotationError::SignatureAlone),
        (None, None) => return Ok(None),
        (Some(text), None) => ("annotation gpufence.dev/grant", text, json::parse(text)),
        (None, Some(text)) => ("annotation gpufence.dev/gpu", text, short::parse(text)),
    };
    let grant = parsed.map_err(|source| AnnotationError::Unreadable { origin, source })?;
    Ok(Some(AnnotatedGrant { grant, origin, text: text.to_owned(), signature: signature.map(str::to_owned) }))
}

/// Where a fixed grant came from, in words.
pub const FIXED: &str = "runtime argument --grant";

/// Reads a grant in the short form that the administrator gave a runtime as its argument, which no image can forge.
pub fn read_fixed(text: &str) -> Result<AnnotatedGrant, AnnotationError> {
    let grant = short::parse(text).map_err(|source| AnnotationError::Unreadable { origin: FIXED, source })?;
    Ok(AnnotatedGrant { grant, origin: FIXED, text: text.to_owned(), signature: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_annotation() {
        let other = ("io.kubernetes.cri.sandbox-id", "x");
        assert_eq!(read([other]), Ok(None));
        assert_eq!(read([other, (GPU, "0=1GiB")]).unwrap().unwrap().origin, "annotation gpufence.dev/gpu");
        assert_eq!(read([(GPU, "0=1GiB"), (GRANT, "{}")]), Err(AnnotationError::Both));
        assert_eq!(read([(GRANT_SIGNATURE, "x")]), Err(AnnotationError::SignatureAlone));
        assert_eq!(read([("gpufence.dev/gpus", "x")]), Err(AnnotationError::Unknown("gpufence.dev/gpus".into())));
    }

    #[test]
    fn an_error_names_annotation_fault_and_remedy() {
        let message = read([(GPU, "0=0")]).unwrap_err().to_string();
        assert_eq!(
            message,
            "annotation gpufence.dev/gpu: the share of GPU 0 has no memory; give a memory size such as 8GiB, 4096MiB or 4096 (MiB)"
        );
    }
}
