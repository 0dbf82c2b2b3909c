//! HTTPS: certificates from files, which are read again when they change, and who may ask.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use axum::serve::Listener;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
        server::WebPkiClientVerifier,
    },
    server::TlsStream,
};

/// How long a client has for the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How often the files are looked at.
const RELOAD: Duration = Duration::from_mins(1);

/// Has all TLS of this process, kube's too, use ring. Twice is as once.
pub fn use_ring() {
    // An error says that it was done before.
    let _ = ring::default_provider().install_default();
}

/// Where the certificates are, all in PEM.
#[derive(Debug, Clone)]
pub struct Files {
    /// Our certificate, with those that it was signed by.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Who signs the certificates of clients. With it, who has none isn't served.
    pub client_authority: Option<PathBuf>,
}

impl Files {
    /// Reads them.
    pub fn load(&self) -> Result<ServerConfig> {
        let chain = certificates(&self.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&self.key).with_context(|| format!("read {}", self.key.display()))?;
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
        let builder = match &self.client_authority {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(file)? {
                    roots.add(certificate).with_context(|| format!("read {}", file.display()))?;
                }
                builder.with_client_cert_verifier(
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?,
                )
            }
        };
        let mut config = builder
            .with_single_cert(chain, key)
            .with_context(|| format!("use {} with {}", self.certificate.display(), self.key.display()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    fn contents(&self) -> Vec<Option<Vec<u8>>> {
        [Some(&self.certificate), Some(&self.key), self.client_authority.as_ref()]
            .into_iter()
            .map(|file| fs::read(file?).ok())
            .collect()
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let context = || format!("read {}", file.display());
    let list: Vec<_> =
        CertificateDer::pem_file_iter(file).with_context(context)?.collect::<Result<_, _>>().with_context(context)?;
    anyhow::ensure!(!list.is_empty(), "{} has no certificate", file.display());
    Ok(list)
}

/// Connections after their handshake. One that is slow at it keeps nobody else waiting.
pub struct TlsListener {
    address: SocketAddr,
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
}

impl TlsListener {
    /// Serves with these certificates at an address that is taken already.
    pub fn new(listener: TcpListener, files: Files) -> Result<Self> {
        let address = listener.local_addr()?;
        let mut contents = files.contents();
        let config = Arc::new(Mutex::new(Arc::new(files.load()?)));
        let current = config.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(RELOAD).await;
                let now = files.contents();
                if now == contents {
                    continue;
                }
                match files.load() {
                    Ok(new) => {
                        *config.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(new);
                        contents = now;
                        tracing::info!("the certificates were read again");
                    }
                    Err(error) => {
                        tracing::warn!("the certificates changed and can't be read; the old ones stay: {error:#}");
                    }
                }
            }
        });
        let (sender, ready) = mpsc::channel(64);
        tokio::spawn(async move {
            loop {
                let (stream, peer) = match listener.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!("accept: {error}");
                        tokio::time::sleep(Duration::from_millis(200)).await;
                        continue;
                    }
                };
                let acceptor = TlsAcceptor::from(current.lock().unwrap_or_else(PoisonError::into_inner).clone());
                let sender = sender.clone();
                tokio::spawn(async move {
                    match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                        Ok(Ok(stream)) => drop(sender.send((stream, peer)).await),
                        Ok(Err(error)) => tracing::info!(%peer, "no TLS: {error}"),
                        Err(_) => tracing::info!(%peer, "no TLS within {} s", HANDSHAKE.as_secs()),
                    }
                });
            }
        });
        Ok(Self { address, ready })
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(accepted) => accepted,
            // The accepting task never ends.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}
