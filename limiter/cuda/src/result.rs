//! The real driver, and the words it answers with.

use gpufence_limiter::hook::Library;

/// The real driver, by the name that the loader's cache has for it.
pub static DRIVER: Library = Library::new(c"libcuda-driver.so.1");

/// CUresult.
pub type CuResult = i32;
/// `CUDA_SUCCESS`.
pub const SUCCESS: CuResult = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: CuResult = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`.
pub const NOT_INITIALIZED: CuResult = 3;
/// `CUDA_ERROR_DEINITIALIZED`.
pub const DEINITIALIZED: CuResult = 4;
/// `CUDA_ERROR_INVALID_CONTEXT`.
pub const INVALID_CONTEXT: CuResult = 201;
/// `CUDA_ERROR_NOT_FOUND`: what an entry point of ours says whose real one an older driver doesn't have.
pub const NOT_FOUND: CuResult = 500;
