//! `cargo xtask arm`: the kernels' tests for 64-bit Arm, compiled here and run by qemu's user emulation.
//!
//! What the machine lacks for it (a standard library for Arm, a linker, the emulator) comes from Debian packages, unpacked below
//! `target/arm`: nothing is installed and no root is needed. Emulation tells whether results are right, never how fast they come.

use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use xshell::{Shell, cmd};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64-static";
/// Where Debian puts the C library of Arm on other machines.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// Debian's compiler, for machines whose own has no standard library for Arm. The tests are for that one's version then.
const COMPILER_PACKAGES: [&str; 2] = ["rustc-web", "libstd-rust-web-dev"];
/// Unpacked beside it, without what it depends on.
const ARM_PACKAGE: &str = "libstd-rust-web-dev:arm64";
const LINKER_PACKAGES: [&str; 2] = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"];
const EMULATOR_PACKAGE: &str = "qemu-user-static";

const REMEDY: &str =
    "the packages come from Debian 12 with its security updates; elsewhere put these in place and run it again:
  rustup target add aarch64-unknown-linux-gnu
  aarch64-linux-gnu-gcc with the C library below /usr/aarch64-linux-gnu, and qemu-aarch64-static, in the PATH";

/// `[--engine] [FILTER…]`: the kernels' tests, then with `--engine` the engine's test of batch invariance.
pub(crate) fn run(sh: &Shell, source: &Path, arguments: &[String]) -> Result<()> {
    if cfg!(target_arch = "aarch64") {
        bail!("this machine is 64-bit Arm: `cargo test -p ernie-kernels` tests its levels without emulation");
    }
    let (engine, filter): (Vec<&String>, Vec<&String>) = arguments.iter().partition(|a| *a == "--engine");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| source.join("target"), Into::into);
    let place = Place { folder: std::path::absolute(target)?.join("arm") };
    let tools = place.tools(sh)?;
    // Not the documentation: rustdoc would be another compiler, and has no tests there.
    tools.cargo(sh, &place, &["-p", "ernie-kernels", "--lib"], &filter)?;
    if !engine.is_empty() {
        tools.cargo(sh, &place, &["-p", "ernie-engine", "--test", "batch_invariance"], &[])?;
    }
    Ok(())
}

/// The folder that everything of this command lives in.
#[derive(Debug)]
struct Place {
    folder: PathBuf,
}

/// What compiles, links and runs; what comes from a package has its path in the unpacked tree.
#[derive(Debug)]
struct Tools {
    /// None: the compiler that cargo takes anyway.
    compiler: Option<PathBuf>,
    linker: PathBuf,
    /// The tree that the linker looks for libraries in, where it is not the machine's.
    sysroot: Option<PathBuf>,
    emulator: PathBuf,
    libraries: PathBuf,
}

impl Place {
    fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    /// Finds the tools, and fetches those that are missing.
    fn tools(&self, sh: &Shell) -> Result<Tools> {
        let own_compiler = own_standard_library(sh);
        let own_linker = runs(sh, LINKER) && Path::new(LIBRARIES).exists();
        let own_emulator = runs(sh, EMULATOR);
        let mut packages = Vec::new();
        if !own_compiler {
            packages.extend(COMPILER_PACKAGES);
        }
        if !own_linker {
            packages.extend(LINKER_PACKAGES);
        }
        if !own_emulator {
            packages.push(EMULATOR_PACKAGE);
        }
        if !packages.is_empty() {
            self.fetch(sh, &packages, !own_compiler)?;
        }
        let root = self.root();
        let unpacked = |own: bool, name: &str| if own { name.into() } else { root.join("usr/bin").join(name) };
        Ok(Tools {
            compiler: (!own_compiler).then(|| root.join("usr/bin/rustc")),
            linker: unpacked(own_linker, LINKER),
            sysroot: (!own_linker).then(|| root.clone()),
            emulator: unpacked(own_emulator, EMULATOR),
            libraries: if own_linker { LIBRARIES.into() } else { root.join(LIBRARIES.trim_start_matches('/')) },
        })
    }

    /// Downloads the packages, with what they need and this machine lacks, and unpacks them; once.
    fn fetch(&self, sh: &Shell, packages: &[&str], for_arm: bool) -> Result<()> {
        let done = self.folder.join("unpacked");
        let wanted = packages.join(" ");
        if fs::read_to_string(&done).is_ok_and(|had| had == wanted) {
            return Ok(());
        }
        println!("arm: fetching {wanted} into {}", self.folder.display());
        sh.remove_path(&self.folder)?;
        let archives = self.folder.join("archives");
        // apt insists on the `partial` folders.
        for folder in [self.folder.join("lists/partial"), archives.join("partial"), self.folder.join("cache")] {
            fs::create_dir_all(folder)?;
        }
        let options = &self.apt_options(sh)?;
        cmd!(sh, "apt-get {options...} update").run().context(REMEDY)?;
        cmd!(sh, "apt-get {options...} install --download-only --yes --no-install-recommends {packages...}")
            .run()
            .context(REMEDY)?;
        if for_arm {
            let _there = sh.push_dir(&archives);
            cmd!(sh, "apt-get {options...} download {ARM_PACKAGE}").run().context(REMEDY)?;
        }
        self.unpack(sh, &archives)?;
        fs::write(done, wanted)?;
        Ok(())
    }

    /// Lists and archives of our own, for both architectures: the machine's stay as they are, and root is not needed.
    fn apt_options(&self, sh: &Shell) -> Result<Vec<OsString>> {
        let native = cmd!(sh, "dpkg --print-architecture").read().context(REMEDY)?;
        let mut options = vec![OsString::from("-qq")];
        let mut set = |name: &str, value: &std::ffi::OsStr| {
            let mut option = OsString::from(name);
            option.push("=");
            option.push(value);
            options.extend([OsString::from("-o"), option]);
        };
        set("APT::Architectures::", native.as_ref());
        set("APT::Architectures::", "arm64".as_ref());
        set("Dir::State::Lists", self.folder.join("lists").as_os_str());
        set("Dir::Cache", self.folder.join("cache").as_os_str());
        set("Dir::Cache::Archives", self.folder.join("archives").as_os_str());
        set("Debug::NoLocking", "1".as_ref());
        set("APT::Sandbox::User", "".as_ref());
        Ok(options)
    }

    fn unpack(&self, sh: &Shell, archives: &Path) -> Result<()> {
        let root = self.root();
        for entry in fs::read_dir(archives)? {
            let package = entry?.path();
            let name = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // The machine's own C library goes with its loader; an update of it would not.
            if name.ends_with(".deb") && !name.starts_with("libc6_") {
                cmd!(sh, "dpkg-deb --extract {package} {root}").quiet().run()?;
                fs::remove_file(&package)?;
            }
        }
        Ok(())
    }
}

impl Tools {
    fn cargo(&self, sh: &Shell, place: &Place, what: &[&str], filter: &[&String]) -> Result<()> {
        let build = place.folder.join("build");
        let runner = format!("{} -cpu max -L {}", self.emulator.display(), self.libraries.display());
        let mut cargo = cmd!(sh, "cargo test --locked --target {TARGET} --target-dir {build} {what...} -- {filter...}")
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", &self.linker)
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner)
            .env("CC_aarch64_unknown_linux_gnu", &self.linker)
            .env_remove("RUSTFLAGS");
        if let Some(sysroot) = &self.sysroot {
            let sysroot = format!("--sysroot={}", sysroot.display());
            cargo = cargo
                .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS", format!("-Clink-arg={sysroot}"))
                .env("CFLAGS_aarch64_unknown_linux_gnu", sysroot);
        }
        if let Some(compiler) = &self.compiler {
            let libraries = place.root().join("usr/lib").join(format!("{}-linux-gnu", std::env::consts::ARCH));
            cargo = cargo.env("RUSTC", compiler).env("LD_LIBRARY_PATH", libraries);
        }
        cargo.run().context("the tests for 64-bit Arm")
    }
}

/// Whether the compiler in use has a standard library for Arm, as after `rustup target add`.
fn own_standard_library(sh: &Shell) -> bool {
    let folder = cmd!(sh, "rustc --print target-libdir --target {TARGET}").quiet().ignore_stderr().read();
    folder.is_ok_and(|folder| Path::new(&folder).exists())
}

fn runs(sh: &Shell, program: &str) -> bool {
    cmd!(sh, "{program} --version").quiet().ignore_stdout().ignore_stderr().run().is_ok()
}
