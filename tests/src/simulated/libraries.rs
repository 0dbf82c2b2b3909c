//! The driver's files: shared libraries built by the C compiler, each with its true file name and soname.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::Description;

const FOLDER: &str = "usr/lib/x86_64-linux-gnu";
const FOLDER_32: &str = "usr/lib/i386-linux-gnu";

/// What stands before `.so.<version>`, and the soname's ending: `1`, or the version itself (`=`).
const LIBRARIES: [(&str, &str); 26] = [
    ("libcuda", "1"),
    ("libcudadebugger", "1"),
    ("libnvidia-ptxjitcompiler", "1"),
    ("libnvidia-nvvm", "4"),
    ("libnvidia-opencl", "1"),
    ("libnvidia-gpucomp", "="),
    ("libnvidia-allocator", "1"),
    ("libnvidia-pkcs11", "="),
    ("libnvidia-cfg", "1"),
    ("libnvcuvid", "1"),
    ("libnvidia-encode", "1"),
    ("libnvidia-opticalflow", "1"),
    ("vdpau/libvdpau_nvidia", "1"),
    ("libnvidia-eglcore", "="),
    ("libnvidia-glcore", "="),
    ("libnvidia-tls", "="),
    ("libnvidia-glsi", "="),
    ("libnvidia-fbc", "1"),
    ("libnvidia-rtcore", "="),
    ("libnvoptix", "1"),
    ("libnvidia-glvkspirv", "="),
    ("libGLX_nvidia", "0"),
    ("libEGL_nvidia", "0"),
    ("libGLESv2_nvidia", "2"),
    ("libnvidia-ngx", "1"),
    ("libGLESv1_CM_nvidia", "1"),
];
const LIBRARIES_32: [(&str, &str); 2] = [("libcuda", "1"), ("libnvidia-ml", "1")];

const STUB: &str = include_str!("../../standins/stub.c");
const CARD: &str = include_str!("../../standins/card.h");
const CUDA: &str = include_str!("../../standins/cuda.c");
const NVML: &str = include_str!("../../standins/nvml.c");
const MPS: &str = include_str!("../../standins/nvidia-cuda-mps-control");
const SMI: &str = include_str!("../../standins/nvidia-smi.c");

/// Writes a driver's libraries, programs, firmware and configuration below `root`.
pub fn install(description: &Description, root: &Path) -> Result<()> {
    let work = root.join("build");
    fs::create_dir_all(&work)?;
    let write = |name: &str, text: &str| -> Result<PathBuf> {
        let path = work.join(name);
        fs::write(&path, text)?;
        Ok(path)
    };
    write("machine.h", &machine_header(description))?;
    write("card.h", CARD)?;
    let stub = object(&write("stub.c", STUB)?, &[])?;
    let cuda = object(&write("cuda.c", CUDA)?, &[])?;
    let nvml = object(&write("nvml.c", NVML)?, &[])?;
    let stub_32 = object(&work.join("stub.c"), &["-m32"])?;
    if let Some(real) = &description.real {
        run(Command::new("cp").arg("-a").arg(real.join("usr")).arg(root))?;
    }
    let is_real = |name: &str, version: &str| {
        let folder = root.join(FOLDER).join("nvidia/current");
        version == description.driver && folder.join(format!("{name}.so.{version}")).exists()
    };
    let versions = description.old_driver.iter().chain([&description.driver]);
    for version in versions {
        for (name, ending) in LIBRARIES {
            if is_real(name, version) {
                continue;
            }
            let object = if name == "libcuda" { &cuda } else { &stub };
            library(root, FOLDER, name, ending, version, object, "elf_x86_64")?;
        }
        if !is_real("libnvidia-ml", version) {
            library(root, FOLDER, "libnvidia-ml", "1", version, &nvml, "elf_x86_64")?;
        }
        for (name, ending) in LIBRARIES_32 {
            library(root, FOLDER_32, name, ending, version, &stub_32, "elf_i386")?;
        }
    }
    let smi = write("nvidia-smi.c", SMI)?;
    if !root.join("usr/lib/nvidia/current/nvidia-smi").exists() {
        program(&smi, &root.join("usr/bin/nvidia-smi"))?;
    }
    let mps = root.join("usr/bin/nvidia-cuda-mps-control");
    fs::create_dir_all(root.join("usr/bin"))?;
    fs::write(&mps, MPS)?;
    fs::set_permissions(&mps, fs::Permissions::from_mode(0o755))?;
    let firmware = root.join("lib/firmware/nvidia").join(&description.driver);
    fs::create_dir_all(&firmware)?;
    for name in ["gsp_ga10x.bin", "gsp_tu10x.bin"] {
        fs::write(firmware.join(name), "simulated firmware\n")?;
    }
    for (path, text) in [
        ("etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n"),
        ("usr/share/vulkan/icd.d/nvidia_icd.json", "{\"file_format_version\": \"1.0.1\"}\n"),
        ("usr/share/glvnd/egl_vendor.d/10_nvidia.json", "{\"file_format_version\": \"1.0.0\"}\n"),
    ] {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        fs::write(path, text)?;
    }
    fs::remove_dir_all(&work)?;
    // Files of the running driver are the newest: ldconfig takes the highest version, which is what a broken host has too.
    run(Command::new("/sbin/ldconfig").arg("-r").arg(root).arg("-X"))
}

fn library(
    root: &Path,
    folder: &str,
    name: &str,
    ending: &str,
    version: &str,
    object: &Path,
    emulation: &str,
) -> Result<()> {
    let path = root.join(folder).join(format!("{name}.so.{version}"));
    let folder = path.parent().context("a library has a folder")?;
    fs::create_dir_all(folder)?;
    let stem = name.rsplit('/').next().unwrap_or(name);
    let soname = format!("{stem}.so.{}", if ending == "=" { version } else { ending });
    run(Command::new("ld")
        .args(["-m", emulation, "-shared", "--build-id=none", "-soname", &soname, "-o"])
        .arg(&path)
        .arg(object))?;
    let link = folder.join(&soname);
    if ending != "=" {
        let _ = fs::remove_file(&link);
        symlink(path.file_name().context("a library has a name")?, &link)?;
    }
    Ok(())
}

fn object(source: &Path, flags: &[&str]) -> Result<PathBuf> {
    let output = source.with_extension(if flags.is_empty() { "o" } else { "32.o" });
    let fixed = ["-c", "-fPIC", "-O1", "-ffreestanding", "-fno-stack-protector", "-fno-asynchronous-unwind-tables"];
    run(Command::new("cc").args(flags).args(fixed).arg("-o").arg(&output).arg(source))?;
    Ok(output)
}

fn program(source: &Path, output: &Path) -> Result<()> {
    fs::create_dir_all(output.parent().context("a program has a folder")?)?;
    run(Command::new("cc").args(["-O1", "-o"]).arg(output).arg(source))?;
    fs::set_permissions(output, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// The machine as C constants, for the stand-ins of CUDA and NVML and for nvidia-smi. A context takes 64 MiB.
fn machine_header(description: &Description) -> String {
    let gpu = |gpu: u32| {
        let mig: String = (0..description.instances(gpu))
            .map(|instance| format!("{{\"{}\", {}, 0}}, ", description.mig_uuid(gpu, instance), instance + 1))
            .collect();
        format!(
            "    {{\"{}\", \"{}\", {}, {{{mig}}}}},\n",
            description.uuid(gpu),
            description.pci_address(gpu),
            description.instances(gpu)
        )
    };
    let usable: String =
        (0..description.gpus).filter(|number| !description.excluded.contains(number)).map(gpu).collect();
    format!(
        "#define DRIVER \"{}\"\n#define MEMORY ({}ULL << 20)\n#define CONTEXT (64ULL << 20)\nstatic const struct machine_gpu machine[] = {{\n{usable}    {{0}},\n}};\n",
        description.driver, description.memory_mib
    )
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| {
        format!("run {}; install gcc and binutils (apt-get install gcc)", command.get_program().to_string_lossy())
    })?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
