"""What several packages need: formats of values and files, settings, errors on all ranks, texts.

``codec``         JSON for the value types, with exact fractions
``settings``      the ``BLINKMPI_`` variables
``together``      failing together: an error on one rank is an error on all
``lazy``          names that a package offers, loaded from their modules when they are asked for
``launcher``      what MPI's launcher tells a process; ``singleton`` tidies up where there is none
``cache_folder``  the user's cache folder; ``lru`` a cache in memory
``shared_memory``  memory that the processes of a machine share
``dlpack``        what a DLPack capsule says of its tensor
``files``         reads a file that a user names, whatever lies there; ``xml_elements`` the XML in it
``numbers``       whole numbers that programs pass
``text``          ranks, counts and sizes in messages
``screen``        whether a terminal shows what is written; ``progress`` a bar there
``chrome_trace``  files in Chrome's trace event format; ``figure`` what all pictures share
"""
