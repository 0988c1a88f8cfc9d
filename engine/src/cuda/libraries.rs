//! Finds CUDA's libraries where users have them. Nothing of CUDA is linked, so a machine without it
//! runs the same program.
//!
//! Searched, in order: the directories in `SPD_CUDA_LIBRARIES`; the dynamic loader; the CUDA
//! toolkit (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`); and the `nvidia` packages of the Python
//! environment (`VIRTUAL_ENV`, `CONDA_PREFIX`, the `python3` on the `PATH`), where PyTorch keeps
//! them.
#![expect(
    unsafe_code,
    reason = "libraries are opened, and asked for their versions, by name"
)]

use std::env;
use std::ffi::{OsStr, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library as Handle, RTLD_LAZY, RTLD_LOCAL};

use super::replacement::{installed, is_installed};
use super::{Fault, Result};

/// Environment variable with directories to search first, separated by colons: of libraries, or
/// with `nvidia` packages.
pub const DIRECTORIES: &str = "SPD_CUDA_LIBRARIES";

/// A library that programs on a GPU call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Library {
    /// The CUDA driver.
    Driver,
    /// Compiler of our kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// All-reduces over ranks.
    Nccl,
}

impl Library {
    /// All of them, most needed first.
    pub const ALL: [Self; 4] = [Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Nccl];

    /// File names, preferred first.
    pub const fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
            Self::Nccl => &["libnccl.so.2"],
        }
    }

    /// Purpose of the library, for messages.
    pub const fn needed_for(self) -> &'static str {
        match self {
            Self::Driver => "any work on a GPU",
            Self::Nvrtc => "compiling the kernels",
            Self::CublasLt => "matrix products",
            Self::Nccl => "more than one GPU",
        }
    }

    /// How to install it, for messages.
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver, 580 or newer",
            Self::Nvrtc => "pip install nvidia-cuda-nvrtc",
            Self::CublasLt => "pip install nvidia-cublas",
            Self::Nccl => "pip install nvidia-nccl-cu13",
        }
    }

    /// Opens it once and keeps it open, so that later opens by file name get the same library.
    pub fn found(self) -> Option<&'static Found> {
        static FOUND: [OnceLock<Option<Found>>; 4] = [const { OnceLock::new() }; 4];
        let found = &FOUND[self as usize];
        found.get_or_init(|| find(self, &Places::here())).as_ref()
    }

    /// The library, or a fault that says how to install it.
    pub(super) fn needed(self) -> Result<&'static Found> {
        self.found().ok_or_else(|| {
            let (file, remedy) = (self.files()[0], self.remedy());
            Fault::new(format!("{file} was not found: {remedy}"))
        })
    }
}

/// An opened library.
#[derive(Debug)]
pub struct Found {
    /// File it was opened from.
    pub path: PathBuf,
    /// Version that it reports, if it does.
    pub version: Option<String>,
    handle: Handle,
}

impl Found {
    /// Opens the library in a file.
    #[cfg(test)]
    pub(super) fn at(path: &Path) -> Self {
        // SAFETY: a test's own library, without initialisers.
        let handle = unsafe { Handle::open(Some(path), RTLD_LAZY | RTLD_LOCAL) };
        Self {
            path: path.to_owned(),
            version: None,
            handle: handle.expect("a library"),
        }
    }

    /// A function of the library, by its name.
    ///
    /// # Safety
    ///
    /// `F` is the function's type.
    pub(super) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller's promise; the library stays open.
        let function = unsafe { self.handle.get::<F>(name.as_bytes()) };
        function.ok().map(|function| *function)
    }
}

/// Directories to search.
#[derive(Debug, Default)]
struct Places {
    /// Before the dynamic loader.
    first: Vec<PathBuf>,
    /// After it.
    then: Vec<PathBuf>,
}

impl Places {
    fn here() -> Self {
        let paths = |name: &str| -> Vec<PathBuf> {
            env::var_os(name).map_or(Vec::new(), |value| env::split_paths(&value).collect())
        };
        let mut places = Self::default();
        for directory in paths(DIRECTORIES) {
            places.first.extend(packages(&directory));
            places.first.push(directory);
        }
        let mut toolkits = [paths("CUDA_HOME"), paths("CUDA_PATH")].concat();
        toolkits.push("/usr/local/cuda".into());
        for toolkit in toolkits {
            places.then.extend(of_toolkit(&toolkit));
        }
        let mut pythons = [paths("VIRTUAL_ENV"), paths("CONDA_PREFIX")].concat();
        pythons.extend(python(&paths("PATH")));
        for python in pythons {
            places.then.extend(of_python(&python));
        }
        places
            .then
            .extend(["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"].map(PathBuf::from));
        places
    }
}

/// Directories of libraries in a toolkit, for any processor: libraries of another one do not open.
fn of_toolkit(toolkit: &Path) -> [PathBuf; 5] {
    [
        "lib64",
        "lib",
        "targets/x86_64-linux/lib",
        "targets/sbsa-linux/lib",
        "targets/aarch64-linux/lib",
    ]
    .map(|lib| toolkit.join(lib))
}

/// Prefix of the first `python3` on the path, which is that of the active environment.
fn python(path: &[PathBuf]) -> Option<PathBuf> {
    let directory = path
        .iter()
        .find(|directory| directory.join("python3").is_file())?;
    directory.parent().map(Path::to_path_buf)
}

/// Directories of libraries in a Python environment, given by its prefix.
fn of_python(prefix: &Path) -> Vec<PathBuf> {
    let lib = prefix.join("lib");
    let mut directories = vec![lib.clone()];
    for version in entries(&lib) {
        if version.file_name().is_some_and(|name| {
            name.to_str()
                .is_some_and(|name| name.starts_with("python3"))
        }) {
            let sites = ["site-packages", "dist-packages"].map(|site| version.join(site));
            directories.extend(sites.iter().flat_map(|site| packages(site)));
        }
    }
    directories
}

/// `nvidia/*/lib` below a directory of Python packages.
fn packages(site: &Path) -> Vec<PathBuf> {
    let packages = entries(&site.join("nvidia"));
    packages
        .into_iter()
        .map(|package| package.join("lib"))
        .collect()
}

/// Sorted paths in a directory; empty if it does not exist.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

fn find(library: Library, places: &Places) -> Option<Found> {
    let files = || library.files().iter();
    let in_all = |directories: &[PathBuf]| -> Vec<PathBuf> {
        files()
            .flat_map(|file| directories.iter().map(move |at| at.join(file)))
            .filter(|path| path.is_file())
            .collect()
    };
    // cudarc asks the loader for the name without a version first.
    let unversioned = files().take(1).map(|file| unversioned(file));
    let candidates = in_all(&places.first)
        .into_iter()
        .chain(unversioned.chain(files().copied()).map(PathBuf::from))
        .chain(in_all(&places.then));
    for path in candidates {
        // SAFETY: these are NVIDIA's libraries, whose initialisers may run at any time; they stay
        // open.
        let Ok(handle) = (unsafe { Handle::open(Some(&path), RTLD_LAZY | RTLD_LOCAL) }) else {
            continue;
        };
        let version = version(library, &handle);
        let path = if path.is_absolute() {
            path
        } else {
            loaded(path.as_os_str()).unwrap_or(path)
        };
        open_neighbours(library, &path);
        return Some(Found {
            path,
            version,
            handle,
        });
    }
    None
}

/// Opens libraries that this one opens by name later and would not find in its own directory.
fn open_neighbours(library: Library, path: &Path) {
    let (Library::Nvrtc, Some(directory)) = (library, path.parent()) else {
        return;
    };
    for neighbour in entries(directory) {
        let name = neighbour.file_name().and_then(OsStr::to_str);
        if name.is_some_and(|name| name.starts_with("libnvrtc-builtins.so.")) {
            // SAFETY: as for the library itself.
            if let Ok(handle) = unsafe { Handle::open(Some(&neighbour), RTLD_LAZY | RTLD_LOCAL) } {
                std::mem::forget(handle);
            }
        }
    }
}

/// File name of a library without its version: `libcuda.so` for `libcuda.so.1`.
fn unversioned(file: &str) -> &str {
    &file[..file.find(".so").map_or(file.len(), |at| at + 3)]
}

/// Paths of the open copies of a library, in a process's memory map.
fn copies<'m>(maps: &'m str, file: &str) -> Vec<&'m str> {
    let stem = unversioned(file);
    let mut copies: Vec<&str> = Vec::new();
    for line in maps.lines() {
        let path = line.find('/').map_or("", |at| &line[at..]);
        let name = path.rsplit('/').next().unwrap_or_default();
        // The file name may be longer than the library's: `libcuda.so.580.82.07`.
        let is_one = name
            .strip_prefix(stem)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        if is_one && !copies.contains(&path) {
            copies.push(path);
        }
    }
    copies
}

/// Path of a library that the dynamic loader found.
fn loaded(file: &OsStr) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    copies(&maps, file.to_str()?).first().map(PathBuf::from)
}

/// Refuses a second open copy of a library: calls would go to one, and the version that is shown
/// and recorded would be the other's.
pub(super) fn is_alone(library: Library) -> Result<()> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let found = library.found().map(|found| found.path.as_path());
    match second(&copies(&maps, library.files()[0]), found) {
        Some(refusal) => Err(Fault::new(refusal)),
        None => Ok(()),
    }
}

/// The refusal of a second copy, in one line.
fn second(copies: &[&str], found: Option<&Path>) -> Option<String> {
    let found = found?;
    let same = |path: &str| {
        let whole = |path: &Path| fs::canonicalize(path).unwrap_or(path.to_owned());
        whole(Path::new(path)) == whole(found)
    };
    let other = Path::new(copies.iter().find(|path| !same(path))?);
    Some(format!(
        "two copies of a library are open, {} and {}, which the loader prefers; set {DIRECTORIES}={}",
        found.display(),
        other.display(),
        other.parent().unwrap_or(other).display()
    ))
}

fn version(library: Library, handle: &Handle) -> Option<String> {
    /// A function that returns one number.
    type One = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Two = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    type Size = unsafe extern "C" fn() -> usize;
    let one = |name: &[u8]| {
        let mut answer = 0;
        // SAFETY: the functions named below have this signature in all versions of their library.
        let status = unsafe { handle.get::<One>(name).ok()?(&raw mut answer) };
        (status == 0).then_some(answer)
    };
    match library {
        Library::Driver => {
            one(b"cuDriverGetVersion").map(|v| format!("{}.{}", v / 1000, v % 1000 / 10))
        }
        Library::Nvrtc => {
            let (mut major, mut minor) = (0, 0);
            // SAFETY: `nvrtcResult nvrtcVersion(int *, int *)`.
            let status =
                unsafe { handle.get::<Two>(b"nvrtcVersion").ok()?(&raw mut major, &raw mut minor) };
            (status == 0).then(|| format!("{major}.{minor}"))
        }
        Library::CublasLt => {
            // SAFETY: `size_t cublasLtGetVersion(void)`.
            let v = unsafe { handle.get::<Size>(b"cublasLtGetVersion").ok()?() };
            Some(format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100))
        }
        Library::Nccl => one(b"ncclGetVersion")
            .map(|v| format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100)),
    }
}

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Name that the driver reports.
    pub name: String,
    /// Bytes of memory.
    pub bytes: usize,
    /// Compute capability, major and minor.
    pub capability: (c_int, c_int),
}

/// Lists the GPUs of this machine.
///
/// # Errors
///
/// If there is no driver, or it fails; the message is one line.
pub fn gpus() -> Result<Vec<Gpu>, String> {
    let driver = Library::Driver
        .found()
        .ok_or_else(|| format!("{} was not found", Library::Driver.files()[0]))?;
    list(&driver.handle).map_err(|(call, code)| match code {
        100 => "the driver finds no GPU".to_owned(),
        803 | 804 => {
            format!("the driver and its library do not match ({call}: error {code})")
        }
        _ => format!("the driver failed ({call}: error {code})"),
    })
}

/// The library has no function of this name.
const MISSING: c_int = 500;

/// Calls the driver without cudarc, which panics if a function is missing.
macro_rules! call {
    ($driver:expr, $name:literal, ($($argument:expr => $type:ty),*)) => {{
        // SAFETY: the signatures are those of the driver API since CUDA 7; buffers outlive the
        // call.
        let status = unsafe {
            let function = $driver
                .get::<unsafe extern "C" fn($($type),*) -> c_int>($name.as_bytes())
                .map_err(|_| ($name, MISSING))?;
            function($($argument),*)
        };
        if status != 0 {
            return Err(($name, status));
        }
    }};
}

/// Opens a GPU and reads its free memory.
fn ask_free(driver: &Handle, ordinal: c_int) -> Result<usize, (&'static str, c_int)> {
    call!(driver, "cuInit", (0 => u32));
    let mut device = 0;
    call!(driver, "cuDeviceGet", (&raw mut device => *mut c_int, ordinal => c_int));
    let mut context = std::ptr::null_mut();
    call!(driver, "cuDevicePrimaryCtxRetain", (&raw mut context => *mut *mut c_void, device => c_int));
    let (mut free, mut all) = (0, 0);
    let mut ask = || {
        call!(driver, "cuCtxSetCurrent", (context => *mut c_void));
        call!(driver, "cuMemGetInfo_v2", (&raw mut free => *mut usize, &raw mut all => *mut usize));
        call!(driver, "cuCtxSetCurrent", (std::ptr::null_mut() => *mut c_void));
        Ok(())
    };
    let asked = ask();
    call!(driver, "cuDevicePrimaryCtxRelease_v2", (device => c_int));
    asked.map(|()| free)
}

fn list(driver: &Handle) -> Result<Vec<Gpu>, (&'static str, c_int)> {
    const MAJOR: c_int = 75;
    const MINOR: c_int = 76;
    call!(driver, "cuInit", (0 => u32));
    let mut count = 0;
    call!(driver, "cuDeviceGetCount", (&raw mut count => *mut c_int));
    let mut gpus = Vec::new();
    for ordinal in 0..count {
        let (mut device, mut bytes, mut major, mut minor) = (0, 0, 0, 0);
        let mut name = [0u8; 128];
        call!(driver, "cuDeviceGet", (&raw mut device => *mut c_int, ordinal => c_int));
        call!(driver, "cuDeviceGetName", (name.as_mut_ptr() => *mut u8, 127 => c_int, device => c_int));
        call!(driver, "cuDeviceTotalMem_v2", (&raw mut bytes => *mut usize, device => c_int));
        call!(driver, "cuDeviceGetAttribute", (&raw mut major => *mut c_int, MAJOR => c_int, device => c_int));
        call!(driver, "cuDeviceGetAttribute", (&raw mut minor => *mut c_int, MINOR => c_int, device => c_int));
        let end = name
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(name.len());
        gpus.push(Gpu {
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
            bytes,
            capability: (major, minor),
        });
    }
    Ok(gpus)
}

/// Bytes of GPU memory that a program can allocate after opening the GPU.
///
/// # Errors
///
/// If the driver fails; the message is one line.
pub fn free_memory(ordinal: usize) -> Result<usize, String> {
    if let Some(replacement) = installed() {
        return Ok(replacement.bytes);
    }
    let driver = Library::Driver.found();
    let driver = driver.ok_or_else(|| format!("{} was not found", Library::Driver.files()[0]))?;
    let ordinal = c_int::try_from(ordinal).map_err(|_| format!("GPU {ordinal}: no such number"))?;
    ask_free(&driver.handle, ordinal)
        .map_err(|(call, code)| format!("GPU {ordinal}: the driver failed ({call}: error {code})"))
}

/// The oldest CUDA of a driver that has all functions that are called:
/// `cuEventElapsedTime_v2` came with it.
const OLDEST: [u32; 2] = [12, 8];

/// Why a driver is too old, in one line; machine code of a compiler needs a driver of its major
/// version.
fn outdated(driver: &str, compiler: &str) -> Option<String> {
    let number = |version: &str| -> Option<[u32; 2]> {
        let (major, minor) = version.split_once('.')?;
        Some([major.parse().ok()?, minor.parse().ok()?])
    };
    let has = number(driver)?;
    let needs = match number(compiler) {
        Some([major, _]) if major > OLDEST[0] => [major, 0],
        _ => OLDEST,
    };
    (has < needs).then(|| {
        let [major, minor] = needs;
        format!(
            "the driver is of CUDA {driver}, and CUDA {major}.{minor} or newer is needed: {}",
            Library::Driver.remedy()
        )
    })
}

/// Everything that this machine lacks to use `gpus` of its GPUs, in one line; `None` if nothing.
///
/// - `joined`: whether the run has several ranks, which need NCCL
pub fn lacks(gpus: usize, joined: bool) -> Option<String> {
    if is_installed() {
        let nccl = Library::Nccl;
        let lacks = joined && nccl.found().is_none();
        return lacks.then(|| format!("{} not found", nccl.files()[0]));
    }
    let needed = Library::ALL
        .into_iter()
        .filter(|&library| library != Library::Nccl || joined);
    let missing: Vec<&str> = needed
        .filter(|library| library.found().is_none())
        .map(|library| library.files()[0])
        .collect();
    if !missing.is_empty() {
        return Some(format!("{} not found", missing.join(", ")));
    }
    let version = |library: Library| library.found()?.version.as_deref();
    if let Some(driver) = version(Library::Driver)
        && let Some(refusal) = outdated(driver, version(Library::Nvrtc).unwrap_or_default())
    {
        return Some(refusal);
    }
    match self::gpus() {
        Err(reason) => Some(reason),
        Ok(found) if found.len() < gpus => Some(format!("{} of {gpus} GPUs", found.len())),
        Ok(_) => None,
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "files of a test alone")]
mod tests {
    use super::*;

    /// Compiles a library that answers `nvrtcVersion`; `None` without a C compiler.
    fn library(path: &Path, version: (u32, u32)) -> Option<()> {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let source = path.with_extension("c");
        let (major, minor) = version;
        let text =
            format!("int nvrtcVersion(int *a, int *b) {{ *a = {major}; *b = {minor}; return 0; }}");
        fs::write(&source, text).unwrap();
        let made = std::process::Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([path, &source])
            .status();
        made.ok()?.success().then_some(())
    }

    #[test]
    fn python_packages_are_searched_after_named_directories() {
        let root = env::temp_dir().join(format!("spd-libraries-{}", std::process::id()));
        let package = root.join("env/lib/python3.12/site-packages/nvidia/cu13/lib");
        let named = root.join("named");
        let in_package = package.join("libnvrtc.so.13");
        // An older version is taken if there is no newer one.
        let made = library(&in_package, (13, 0))
            .and_then(|()| library(&named.join("libnvrtc.so.12"), (12, 9)));
        if made.is_none() {
            return spd_testing::skip("cc");
        }
        let mut places = Places {
            first: Vec::new(),
            then: of_python(&root.join("env")),
        };
        let found = find(Library::Nvrtc, &places);
        // Unless the dynamic loader finds one.
        let found = found.expect("it is in the package");
        if found.path.starts_with(&root) {
            assert_eq!(
                (found.path, found.version),
                (in_package, Some("13.0".into()))
            );
        }
        places.first.push(named.clone());
        let found = find(Library::Nvrtc, &places).unwrap();
        let expected = (named.join("libnvrtc.so.12"), Some("12.9".into()));
        assert_eq!((found.path, found.version), expected);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_toolkit_has_libraries_for_processors_of_arm() {
        let root = env::temp_dir().join(format!("spd-toolkit-{}", std::process::id()));
        for target in ["sbsa-linux", "aarch64-linux"] {
            let path = root.join(target).join("targets").join(target);
            let path = path.join("lib/libnvrtc.so.13");
            let Some(()) = library(&path, (13, 0)) else {
                return spd_testing::skip("cc");
            };
            let places = Places {
                first: of_toolkit(&root.join(target)).into(),
                then: Vec::new(),
            };
            assert_eq!(find(Library::Nvrtc, &places).unwrap().path, path);
        }
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_driver_that_is_too_old_is_refused() {
        for [driver, compiler] in [["13.0", "13.0"], ["13.1", "13.0"], ["12.8", "12.9"]] {
            assert_eq!(outdated(driver, compiler), None);
        }
        assert_eq!(
            outdated("12.4", "12.9").unwrap(),
            "the driver is of CUDA 12.4, and CUDA 12.8 or newer is needed: install NVIDIA's driver, 580 or newer"
        );
        assert!(
            outdated("12.9", "13.0")
                .unwrap()
                .contains("CUDA 13.0 or newer")
        );
    }

    #[test]
    fn a_second_copy_of_a_library_is_refused() {
        let line = |path: &str| format!("7f00-7f01 r-xp 00000000 00:00 1    {path}\n");
        let [one, other] = ["/one/libnvrtc.so.13.0.88", "/other/lib/libnvrtc.so"];
        let paths = [one, "/one/libnvrtc-builtins.so.13.0", one, other];
        let maps = paths.map(line).concat();
        let found = copies(&maps, "libnvrtc.so.13");
        assert_eq!(found, [one, other]);
        assert_eq!(second(&found[..1], Some(Path::new(one))), None);
        assert_eq!(
            second(&found, Some(Path::new(one))).unwrap(),
            "two copies of a library are open, /one/libnvrtc.so.13.0.88 and /other/lib/libnvrtc.so, which the loader prefers; set SPD_CUDA_LIBRARIES=/other/lib"
        );
    }

    #[test]
    fn a_file_that_is_no_library_is_skipped() {
        let root = env::temp_dir().join(format!("spd-no-library-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("libnccl.so.2"), "not a library").unwrap();
        let places = Places {
            first: vec![root.clone()],
            then: Vec::new(),
        };
        let found = find(Library::Nccl, &places);
        assert!(found.is_none_or(|found| !found.path.starts_with(&root)));
        fs::remove_dir_all(&root).unwrap();
    }
}
