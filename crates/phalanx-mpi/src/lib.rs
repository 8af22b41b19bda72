//! One broadcast through Open MPI, whose library is loaded at run time: nothing of MPI is needed
//! to build.
//!
//! Handles of Open MPI 1 to 5 are addresses of exported objects (`ompi_mpi_comm_world`,
//! `ompi_mpi_byte`), as `mpi.h` has them.

#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::ffi::{c_int, c_void};
use std::path::Path;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// The longest text that [`broadcast`] sends.
pub const MAX_BYTES: usize = 512;

/// `MPI_SUCCESS`
const SUCCESS: c_int = 0;

type Init = unsafe extern "C" fn(*mut c_int, *mut *mut *mut u8) -> c_int;
type Broadcast = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, c_int, *mut c_void) -> c_int;
type Size = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
type Finalize = unsafe extern "C" fn() -> c_int;

/// Initializes MPI, sends `text` from process 0 (all others give `None`) to all `processes` that `mpirun`
/// started, finalizes MPI, and returns the text. *Blocks* until all processes have called it.
///
/// Call it once, in a process that does nothing else: MPI starts threads and ends the process
/// on its errors.
///
/// # Errors
///
/// What is wrong with the library, or the number of MPI's error.
pub fn broadcast(library: &Path, processes: usize, text: Option<&str>) -> Result<String, String> {
    let mut bytes = [0u8; MAX_BYTES];
    if let Some(text) = text {
        let room = bytes.get_mut(..text.len());
        room.ok_or("the text is too long")?
            .copy_from_slice(text.as_bytes());
    }
    let shown = library.display();
    // SAFETY: loading runs the library's initializers. It is MPI's library, which programs load at
    // their start; this process has no other thread. Global, as Open MPI's plugins look for symbols in it.
    let mpi = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| format!("cannot load {shown}: {error}"))?;
    let missing = |error| format!("{shown} is not Open MPI's library: {error}");
    // SAFETY: the types are those of the MPI standard's C functions; the objects' addresses are the handles.
    let (init, size_of, bcast, finalize, world, byte) = unsafe {
        (
            mpi.get::<Init>(b"MPI_Init\0").map_err(missing)?,
            mpi.get::<Size>(b"MPI_Comm_size\0").map_err(missing)?,
            mpi.get::<Broadcast>(b"MPI_Bcast\0").map_err(missing)?,
            mpi.get::<Finalize>(b"MPI_Finalize\0").map_err(missing)?,
            mpi.get::<*mut c_void>(b"ompi_mpi_comm_world\0")
                .map_err(missing)?,
            mpi.get::<*mut c_void>(b"ompi_mpi_byte\0")
                .map_err(missing)?,
        )
    };
    let done = |name: &str, code: c_int| match code {
        SUCCESS => Ok(()),
        code => Err(format!("{name} returned error {code}")),
    };
    // SAFETY: null arguments are allowed since MPI 2.
    done("MPI_Init", unsafe {
        init(std::ptr::null_mut(), std::ptr::null_mut())
    })?;
    let (world, byte) = (world.as_raw_ptr(), byte.as_raw_ptr());
    let mut size = 0;
    // SAFETY: MPI is initialized; the number lives during the call.
    done("MPI_Comm_size", unsafe { size_of(world, &mut size) })?;
    if usize::try_from(size) != Ok(processes) {
        // A library that does not know this mpirun takes each process for a job of its own.
        return Err(format!(
            "{shown} sees {size} of the {processes} processes that mpirun started: it belongs to another Open MPI"
        ));
    }
    // SAFETY: MPI is initialized; the buffer has as many bytes as are named and lives during the call.
    done("MPI_Bcast", unsafe {
        bcast(
            bytes.as_mut_ptr().cast(),
            MAX_BYTES as c_int,
            byte,
            0,
            world,
        )
    })?;
    // SAFETY: MPI is initialized, and nothing of it is in use.
    done("MPI_Finalize", unsafe { finalize() })?;
    // MPI's threads and handlers may still refer to it.
    std::mem::forget(mpi);
    let end = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(MAX_BYTES);
    String::from_utf8(bytes[..end].to_vec()).map_err(|_| "process 0 sent no text".to_owned())
}
