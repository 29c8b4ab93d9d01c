//! Memory of the engine's own on a GPU, exported to peers: staging for messages between other GPUs.

use super::error::{Error, Result};
use super::reach;
use super::state::{ContextKey, Entered};
use super::types::{code, Context, IpcHandle};
use crate::stats::{self, Counter};

/// Memory of a GPU that is left to others: no staging is taken from this rest, and staging is given back if
/// there is less.
pub const RESERVE: u64 = 256 << 20;

/// Memory that the engine has allocated and exported. Freed when dropped; nobody may use it any more then.
#[derive(Debug)]
pub struct StagedMemory {
    context: ContextKey,
    /// The context was made for it.
    is_own_context: bool,
    address: u64,
    bytes: u64,
    handle: IpcHandle,
    /// Contexts of this process that may reach it.
    reached_from: Vec<ContextKey>,
}

impl StagedMemory {
    /// Allocates memory in a context that exists. [`Error::Exhausted`] if the device has little left.
    pub fn allocate(context: ContextKey, bytes: u64) -> Result<StagedMemory> {
        let mut memory = StagedMemory::allocate_private(context, bytes)?;
        let entered = Entered::enter_same(context)?;
        entered
            .driver()
            .ipc_get_mem_handle(&mut memory.handle, memory.address)?;
        Ok(memory)
    }

    /// The same for this process alone: nothing is exported, and the handle means nothing.
    pub fn allocate_private(context: ContextKey, bytes: u64) -> Result<StagedMemory> {
        let entered = Entered::enter_same(context)?;
        let driver = entered.driver();
        let size = usize::try_from(bytes).map_err(|_| Error::Exhausted("address space"))?;
        let mut memory = StagedMemory {
            context,
            is_own_context: false,
            address: 0,
            bytes,
            handle: IpcHandle([0; 64]),
            reached_from: Vec::new(),
        };
        if free_bytes(&entered)? < bytes.saturating_add(2 * RESERVE) {
            return Err(Error::Exhausted("memory of a GPU"));
        }
        driver.mem_alloc(&mut memory.address, size)?;
        Ok(memory)
    }

    /// Allocates memory on a device that this process does not use, in a context made for it (about half a
    /// gigabyte of the device's memory). It is not the primary context: that one is the program's, should it
    /// use the device later.
    pub fn allocate_on(ordinal: i32, bytes: u64) -> Result<StagedMemory> {
        let device = reach::device(ordinal).ok_or(Error::NoContext)?.device;
        let entered = Entered::relaxed()?;
        let (mut context, mut popped) = (Context::NULL, Context::NULL);
        entered.driver().ctx_create(&mut context, 0, device)?;
        // SAFETY: making a context makes it current, which is taken back.
        unsafe { entered.driver().ctx_pop_current(&raw mut popped)? };
        let memory = ContextKey::of(context).and_then(|key| StagedMemory::allocate(key, bytes));
        match memory {
            Ok(mut memory) => {
                memory.is_own_context = true;
                Ok(memory)
            }
            Err(error) => {
                // SAFETY: made above, and known to nobody.
                let _ = unsafe { entered.driver().ctx_destroy(context) };
                Err(error)
            }
        }
    }

    /// Address in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the device has little memory left, or the context is gone.
    #[must_use]
    pub fn is_in_the_way(&self) -> bool {
        is_short(self.context)
    }

    /// What peers open.
    #[must_use]
    pub fn handle(&self) -> IpcHandle {
        self.handle
    }

    /// Where it was allocated.
    #[must_use]
    pub fn context(&self) -> ContextKey {
        self.context
    }

    /// Whether the context is the engine's own.
    #[must_use]
    pub fn is_own_context(&self) -> bool {
        self.is_own_context
    }

    /// Lets copies that run in another context of this process reach it.
    pub fn reach_from(&mut self, context: ContextKey) -> Result<()> {
        if self.reached_from.contains(&context) {
            return Ok(());
        }
        let entered = Entered::enter_same(context)?;
        // SAFETY: the context of the memory is alive as long as this.
        match unsafe {
            entered
                .driver()
                .ctx_enable_peer_access(self.context.handle, 0)
        } {
            Ok(()) => {}
            Err(error) if error.is(code::PEER_ACCESS_ALREADY_ENABLED) => {}
            Err(error) => return Err(error),
        }
        self.reached_from.retain(ContextKey::is_alive);
        self.reached_from.push(context);
        Ok(())
    }
}

/// Whether the device of a context has little memory left, or the context is gone.
#[must_use]
pub fn is_short(context: ContextKey) -> bool {
    match Entered::enter_same(context).and_then(|entered| free_bytes(&entered)) {
        Ok(free) => free < RESERVE,
        Err(error) if error.context_is_gone() => true,
        Err(_) => {
            // Asked again at the next round of garbage collection.
            stats::add(Counter::DriverRetries, 1);
            !context.is_alive()
        }
    }
}

/// Free memory of the device whose context is entered.
pub fn free_bytes(entered: &Entered) -> Result<u64> {
    let (mut free, mut total) = (0, 0);
    entered.driver().mem_get_info(&mut free, &mut total)?;
    Ok(free as u64)
}

impl Drop for StagedMemory {
    fn drop(&mut self) {
        let Ok(entered) = Entered::enter_same(self.context) else {
            return;
        };
        if self.address != 0 {
            // SAFETY: allocated by `allocate`, freed once.
            if let Err(error) = unsafe { entered.driver().mem_free(self.address) } {
                log::debug!("freeing staging memory: {error}");
            }
        }
        drop(entered);
        if self.is_own_context {
            if let Ok(entered) = Entered::relaxed() {
                // SAFETY: made by `allocate_on`; what was in it is freed.
                let _ = unsafe { entered.driver().ctx_destroy(self.context.handle) };
            }
        }
    }
}
