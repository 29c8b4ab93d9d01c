//! The description of an ABI and the constants of the three that are known, one line each: Open MPI 4 and 5, the
//! MPICH family, the MPI 5 standard ABI.
//!
//! Each value was printed by a C program built with the compiler wrapper of each library; the test beside this file does
//! so again wherever those wrappers are installed.

#[cfg(test)]
use super::handles::Handle as _;
use super::handles::{Comm, Datatype, Errhandler, File, Group, Info, Message, Op, Request, Win};
use std::ffi::CStr;

/// A binary interface of MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Open MPI 4 and 5, and what is built from it (`libmpi.so.40`).
    OpenMpi,
    /// MPICH and those that share its ABI: Intel MPI, Cray MPICH, MVAPICH, ParaStation (`libmpi.so.12`).
    Mpich,
    /// The ABI of the MPI 5 standard (`libmpi_abi.so.1`).
    Standard,
}

/// Declares [`Abi`] and its values. Handles are numbers in two ABIs, addresses of data symbols in Open MPI.
macro_rules! abi {
    (
        layout { $($(#[$doc:meta])* $layout:ident: $layout_type:ty = $lo:expr, $lm:expr, $ls:expr;)* }
        ints { $($int:ident = $int_c:ident: $io:expr, $im:expr, $is:expr;)* }
        addresses { $($address:ident = $address_c:ident: $ao:expr, $am:expr, $as:expr;)* }
        handles { $($handle:ident: $kind:ident = $handle_c:ident: $symbol:ident, $hm:expr, $hs:expr;)* }
    ) => {
        /// Description of the ABI of the MPI library in this process.
        #[derive(Clone, Debug)]
        pub struct Abi {
            $($(#[$doc])* pub $layout: $layout_type,)*
            $(#[doc = concat!("`", stringify!($int_c), "`")] pub $int: i32,)*
            $(#[doc = concat!("`", stringify!($address_c), "`")] pub $address: usize,)*
            $(#[doc = concat!("`", stringify!($handle_c), "`")] pub $handle: $kind,)*
        }

        impl Abi {
            /// The MPICH family. Status: `{count_lo, count_hi_and_cancelled, SOURCE, TAG, ERROR}`.
            pub(super) const MPICH: Abi = Abi { $($layout: $lm,)* $($int: $im,)* $($address: $am,)* $($handle: $kind::constant($hm),)* };

            /// The MPI 5 standard ABI. Status: `{SOURCE, TAG, ERROR, reserved[5]}`.
            pub(crate) const STANDARD: Abi = Abi { $($layout: $ls,)* $($int: $is,)* $($address: $as,)* $($handle: $kind::constant($hs),)* };

            /// Open MPI. Status: `{SOURCE, TAG, ERROR, cancelled, count}`. `locate` gives the address of a data symbol
            /// of the library; `Err` names the first one missing.
            pub(super) fn open_mpi(locate: impl Fn(&CStr) -> Option<usize>) -> Result<Abi, &'static str> {
                Ok(Abi {
                    $($layout: $lo,)*
                    $($int: $io,)*
                    $($address: $ao,)*
                    $($handle: {
                        const NAME: &str = concat!(stringify!($symbol), "\0");
                        let name = CStr::from_bytes_with_nul(NAME.as_bytes()).map_err(|_| NAME)?;
                        $kind::constant(locate(name).ok_or(stringify!($symbol))?)
                    },)*
                })
            }

            /// Every integer constant and address with its C name.
            #[cfg(test)]
            pub(super) fn listed_numbers(&self) -> Vec<(&'static str, i64)> {
                #[allow(clippy::cast_possible_wrap)]
                let mut listed = vec![$((stringify!($address_c), self.$address as i64),)*];
                listed.extend([$((stringify!($int_c), i64::from(self.$int)),)*]);
                listed
            }

            /// Every handle with its C name.
            #[cfg(test)]
            pub(super) fn listed_handles(&self) -> Vec<(&'static str, usize)> {
                vec![$((stringify!($handle_c), self.$handle.word()),)*]
            }
        }

        /// The C name of every handle and the data symbol of Open MPI whose address it is.
        #[cfg(test)]
        pub(super) const OPEN_MPI_SYMBOLS: &[(&str, &str)] = &[$((stringify!($handle_c), stringify!($symbol)),)*];
    };
}

// Columns: Open MPI, MPICH, MPI 5 standard.
abi! {
    layout {
        /// Which of the known ABIs this is.
        family: Family = Family::OpenMpi, Family::Mpich, Family::Standard;
        /// Size of a handle in an array of handles, in bytes (an `MPI_File` is always a pointer).
        handle_bytes: usize = 8, 4, 8;
        /// Size of an `MPI_Status`, in bytes.
        status_bytes: usize = 24, 20, 32;
        /// Offset of `MPI_SOURCE` in a status, in bytes.
        source_offset: usize = 0, 8, 0;
        /// Offset of `MPI_TAG` in a status, in bytes.
        tag_offset: usize = 4, 12, 4;
        /// Offset of `MPI_ERROR` in a status, in bytes.
        error_offset: usize = 8, 16, 8;
    }
    ints {
        proc_null = MPI_PROC_NULL: -2, -1, -3;
        any_source = MPI_ANY_SOURCE: -1, -2, -1;
        any_tag = MPI_ANY_TAG: -1, -1, -2;
        undefined = MPI_UNDEFINED: -32766, -32766, -32766;
        root = MPI_ROOT: -4, -3, -4;
        thread_single = MPI_THREAD_SINGLE: 0, 0, 0;
        thread_funneled = MPI_THREAD_FUNNELED: 1, 1, 1024;
        thread_serialized = MPI_THREAD_SERIALIZED: 2, 2, 2048;
        thread_multiple = MPI_THREAD_MULTIPLE: 3, 3, 4096;
        success = MPI_SUCCESS: 0, 0, 0;
        err_buffer = MPI_ERR_BUFFER: 1, 1, 1;
        err_count = MPI_ERR_COUNT: 2, 2, 2;
        err_type = MPI_ERR_TYPE: 3, 3, 3;
        err_tag = MPI_ERR_TAG: 4, 4, 4;
        err_comm = MPI_ERR_COMM: 5, 5, 5;
        err_rank = MPI_ERR_RANK: 6, 6, 6;
        err_request = MPI_ERR_REQUEST: 7, 19, 7;
        err_root = MPI_ERR_ROOT: 8, 7, 8;
        err_group = MPI_ERR_GROUP: 9, 8, 9;
        err_op = MPI_ERR_OP: 10, 9, 10;
        err_topology = MPI_ERR_TOPOLOGY: 11, 10, 11;
        err_dims = MPI_ERR_DIMS: 12, 11, 12;
        err_arg = MPI_ERR_ARG: 13, 12, 13;
        err_unknown = MPI_ERR_UNKNOWN: 14, 13, 14;
        err_truncate = MPI_ERR_TRUNCATE: 15, 14, 15;
        err_other = MPI_ERR_OTHER: 16, 15, 16;
        err_intern = MPI_ERR_INTERN: 17, 16, 17;
        err_in_status = MPI_ERR_IN_STATUS: 18, 17, 19;
        err_pending = MPI_ERR_PENDING: 19, 18, 18;
        err_no_mem = MPI_ERR_NO_MEM: 39, 34, 39;
        max_error_string = MPI_MAX_ERROR_STRING: 256, 512, 512;
        max_library_version_string = MPI_MAX_LIBRARY_VERSION_STRING: 256, 8192, 8192;
        max_processor_name = MPI_MAX_PROCESSOR_NAME: 256, 128, 256;
        max_object_name = MPI_MAX_OBJECT_NAME: 64, 128, 128;
        ident = MPI_IDENT: 0, 0, 201;
        congruent = MPI_CONGRUENT: 1, 1, 202;
        similar = MPI_SIMILAR: 2, 2, 203;
        unequal = MPI_UNEQUAL: 3, 3, 204;
        tag_ub = MPI_TAG_UB: 0, 1681915905, 501;
        comm_type_shared = MPI_COMM_TYPE_SHARED: 0, 1, 221;
        cart = MPI_CART: 1, 2, 211;
        graph = MPI_GRAPH: 2, 1, 212;
        dist_graph = MPI_DIST_GRAPH: 3, 3, 213;
        order_c = MPI_ORDER_C: 0, 56, 12;
        order_fortran = MPI_ORDER_FORTRAN: 1, 57, 15;
        distribute_block = MPI_DISTRIBUTE_BLOCK: 0, 121, 17;
        distribute_cyclic = MPI_DISTRIBUTE_CYCLIC: 1, 122, 18;
        distribute_none = MPI_DISTRIBUTE_NONE: 2, 123, 16;
        distribute_dflt_darg = MPI_DISTRIBUTE_DFLT_DARG: -1, -49767, 19;
        combiner_named = MPI_COMBINER_NAMED: 0, 1, 101;
        combiner_dup = MPI_COMBINER_DUP: 1, 2, 102;
        combiner_contiguous = MPI_COMBINER_CONTIGUOUS: 2, 3, 103;
        combiner_vector = MPI_COMBINER_VECTOR: 3, 4, 104;
        combiner_hvector = MPI_COMBINER_HVECTOR: 5, 6, 105;
        combiner_indexed = MPI_COMBINER_INDEXED: 6, 7, 106;
        combiner_hindexed = MPI_COMBINER_HINDEXED: 8, 9, 107;
        combiner_indexed_block = MPI_COMBINER_INDEXED_BLOCK: 9, 10, 108;
        combiner_hindexed_block = MPI_COMBINER_HINDEXED_BLOCK: 18, 19, 109;
        combiner_struct = MPI_COMBINER_STRUCT: 11, 12, 110;
        combiner_subarray = MPI_COMBINER_SUBARRAY: 12, 13, 111;
        combiner_darray = MPI_COMBINER_DARRAY: 13, 14, 112;
        combiner_f90_real = MPI_COMBINER_F90_REAL: 14, 15, 113;
        combiner_f90_complex = MPI_COMBINER_F90_COMPLEX: 15, 16, 114;
        combiner_f90_integer = MPI_COMBINER_F90_INTEGER: 16, 17, 115;
        combiner_resized = MPI_COMBINER_RESIZED: 17, 18, 116;
    }
    addresses {
        bottom = MPI_BOTTOM: 0, 0, 0;
        in_place = MPI_IN_PLACE: 1, usize::MAX, 1;
        status_ignore = MPI_STATUS_IGNORE: 0, 1, 0;
        statuses_ignore = MPI_STATUSES_IGNORE: 0, 1, 0;
    }
    handles {
        comm_world: Comm = MPI_COMM_WORLD: ompi_mpi_comm_world, 0x4400_0000, 0x101;
        comm_self: Comm = MPI_COMM_SELF: ompi_mpi_comm_self, 0x4400_0001, 0x102;
        comm_null: Comm = MPI_COMM_NULL: ompi_mpi_comm_null, 0x0400_0000, 0x100;
        group_null: Group = MPI_GROUP_NULL: ompi_mpi_group_null, 0x0800_0000, 0x108;
        group_empty: Group = MPI_GROUP_EMPTY: ompi_mpi_group_empty, 0x4800_0000, 0x109;
        request_null: Request = MPI_REQUEST_NULL: ompi_request_null, 0x2c00_0000, 0x180;
        message_null: Message = MPI_MESSAGE_NULL: ompi_message_null, 0x2c00_0000, 0x128;
        message_no_proc: Message = MPI_MESSAGE_NO_PROC: ompi_message_no_proc, 0x6c00_0000, 0x129;
        info_null: Info = MPI_INFO_NULL: ompi_mpi_info_null, 0x1c00_0000, 0x130;
        errhandler_null: Errhandler = MPI_ERRHANDLER_NULL: ompi_mpi_errhandler_null, 0x1400_0000, 0x140;
        errors_are_fatal: Errhandler = MPI_ERRORS_ARE_FATAL: ompi_mpi_errors_are_fatal, 0x5400_0000, 0x141;
        errors_return: Errhandler = MPI_ERRORS_RETURN: ompi_mpi_errors_return, 0x5400_0001, 0x143;
        win_null: Win = MPI_WIN_NULL: ompi_mpi_win_null, 0x2000_0000, 0x110;
        file_null: File = MPI_FILE_NULL: ompi_mpi_file_null, 0x0, 0x118;
        op_null: Op = MPI_OP_NULL: ompi_mpi_op_null, 0x1800_0000, 0x20;
        sum: Op = MPI_SUM: ompi_mpi_op_sum, 0x5800_0003, 0x21;
        max: Op = MPI_MAX: ompi_mpi_op_max, 0x5800_0001, 0x23;
        min: Op = MPI_MIN: ompi_mpi_op_min, 0x5800_0002, 0x22;
        land: Op = MPI_LAND: ompi_mpi_op_land, 0x5800_0005, 0x30;
        lor: Op = MPI_LOR: ompi_mpi_op_lor, 0x5800_0007, 0x31;
        band: Op = MPI_BAND: ompi_mpi_op_band, 0x5800_0006, 0x28;
        bor: Op = MPI_BOR: ompi_mpi_op_bor, 0x5800_0008, 0x29;
        datatype_null: Datatype = MPI_DATATYPE_NULL: ompi_mpi_datatype_null, 0x0c00_0000, 0x200;
        byte: Datatype = MPI_BYTE: ompi_mpi_byte, 0x4c00_010d, 0x247;
        packed: Datatype = MPI_PACKED: ompi_mpi_packed, 0x4c00_010f, 0x207;
        char_: Datatype = MPI_CHAR: ompi_mpi_char, 0x4c00_0101, 0x243;
        signed_char: Datatype = MPI_SIGNED_CHAR: ompi_mpi_signed_char, 0x4c00_0118, 0x244;
        unsigned_char: Datatype = MPI_UNSIGNED_CHAR: ompi_mpi_unsigned_char, 0x4c00_0102, 0x245;
        short_: Datatype = MPI_SHORT: ompi_mpi_short, 0x4c00_0203, 0x208;
        unsigned_short: Datatype = MPI_UNSIGNED_SHORT: ompi_mpi_unsigned_short, 0x4c00_0204, 0x20c;
        int_: Datatype = MPI_INT: ompi_mpi_int, 0x4c00_0405, 0x209;
        unsigned_: Datatype = MPI_UNSIGNED: ompi_mpi_unsigned, 0x4c00_0406, 0x20d;
        long_: Datatype = MPI_LONG: ompi_mpi_long, 0x4c00_0807, 0x20a;
        unsigned_long: Datatype = MPI_UNSIGNED_LONG: ompi_mpi_unsigned_long, 0x4c00_0808, 0x20e;
        long_long: Datatype = MPI_LONG_LONG: ompi_mpi_long_long_int, 0x4c00_0809, 0x20b;
        unsigned_long_long: Datatype = MPI_UNSIGNED_LONG_LONG: ompi_mpi_unsigned_long_long, 0x4c00_0819, 0x20f;
        float_: Datatype = MPI_FLOAT: ompi_mpi_float, 0x4c00_040a, 0x210;
        double_: Datatype = MPI_DOUBLE: ompi_mpi_double, 0x4c00_080b, 0x214;
        long_double: Datatype = MPI_LONG_DOUBLE: ompi_mpi_long_double, 0x4c00_100c, 0x220;
        int8_t: Datatype = MPI_INT8_T: ompi_mpi_int8_t, 0x4c00_0137, 0x240;
        int16_t: Datatype = MPI_INT16_T: ompi_mpi_int16_t, 0x4c00_0238, 0x248;
        int32_t: Datatype = MPI_INT32_T: ompi_mpi_int32_t, 0x4c00_0439, 0x250;
        int64_t: Datatype = MPI_INT64_T: ompi_mpi_int64_t, 0x4c00_083a, 0x258;
        uint8_t: Datatype = MPI_UINT8_T: ompi_mpi_uint8_t, 0x4c00_013b, 0x241;
        uint16_t: Datatype = MPI_UINT16_T: ompi_mpi_uint16_t, 0x4c00_023c, 0x249;
        uint32_t: Datatype = MPI_UINT32_T: ompi_mpi_uint32_t, 0x4c00_043d, 0x251;
        uint64_t: Datatype = MPI_UINT64_T: ompi_mpi_uint64_t, 0x4c00_083e, 0x259;
        aint: Datatype = MPI_AINT: ompi_mpi_aint, 0x4c00_0843, 0x201;
        count: Datatype = MPI_COUNT: ompi_mpi_count, 0x4c00_0845, 0x202;
        offset: Datatype = MPI_OFFSET: ompi_mpi_offset, 0x4c00_0844, 0x203;
    }
}
